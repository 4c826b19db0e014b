"""Stores that share a byte limit: the least recently used one goes first, as a whole."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from tidekv_llm.prefixes.base import PrefixKey, StoredPrefix, common_prefix


class PrefixPool:
    """Finished stores in host memory.

    Args:
        limit_bytes: most bytes they may take together; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._stores: OrderedDict[str, StoredPrefix] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes of all stores together; a lower one evicts at once."""
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit_bytes: int | None) -> None:
        with self._lock:
            self._limit_bytes = limit_bytes
            self._evict(keep=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all stores."""
        with self._lock:
            return sum(store.nbytes for store in self._stores.values())

    def get(self, key: PrefixKey) -> StoredPrefix | None:
        """The store of this key, now the most recently used."""
        with self._lock:
            store = self._stores.get(key.digest)
            if store is not None:
                self._stores.move_to_end(key.digest)
            return store

    def longest(self, model: str, token_ids: Sequence[int]) -> tuple[StoredPrefix, int] | None:
        """The store that shares the longest prefix with a prompt, and that prefix's length."""
        ids = tuple(token_ids)
        with self._lock:
            found = [
                (common_prefix(store.token_ids, ids), digest)
                for digest, store in self._stores.items()
                if store.key.model == model
            ]
            length, digest = max(found, default=(0, ""))
            if not length:
                return None
            self._stores.move_to_end(digest)
            return self._stores[digest], length

    def add(self, store: StoredPrefix) -> None:
        """Take a finished store, and evict others until all fit."""
        with self._lock:
            self._stores[store.key.digest] = store
            self._stores.move_to_end(store.key.digest)
            self._evict(keep=1)

    def remove(self, key: PrefixKey) -> None:
        """Forget a store; requests that are reading it keep it alive until they end."""
        with self._lock:
            self._stores.pop(key.digest, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._stores.clear()

    def _evict(self, *, keep: int) -> None:
        while self._limit_bytes is not None and len(self._stores) > keep and self._total() > self._limit_bytes:
            _, store = self._stores.popitem(last=False)
            store.discard()  # its session still knows it: only this frees the memory

    def _total(self) -> int:
        return sum(store.nbytes for store in self._stores.values())
