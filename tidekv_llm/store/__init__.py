"""Where a document's keys and values wait for the next question: host memory or disk, never the device."""

from tidekv_llm.store.base import PrefixStore, StoreKey
from tidekv_llm.store.disk import DiskStore
from tidekv_llm.store.memory import MemoryStore
from tidekv_llm.store.pool import StorePool

__all__ = ["DiskStore", "MemoryStore", "PrefixStore", "StoreKey", "StorePool"]
