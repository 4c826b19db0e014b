"""Stores that share a byte limit: the least recently used one goes first, as a whole."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from tidekv_llm.store.base import PrefixStore, StoreKey, common_prefix


class StorePool:
    """Finished stores in host memory.

    Args:
        limit_bytes: most bytes they may take together; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._stores: OrderedDict[str, PrefixStore] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all stores."""
        with self._lock:
            return sum(store.nbytes for store in self._stores.values())

    def get(self, key: StoreKey) -> PrefixStore | None:
        """The store of this key, now the most recently used."""
        with self._lock:
            store = self._stores.get(key.digest)
            if store is not None:
                self._stores.move_to_end(key.digest)
            return store

    def longest(self, model: str, numerics: str, token_ids: Sequence[int]) -> tuple[PrefixStore, int] | None:
        """The store that shares the longest prefix with a prompt, and that prefix's length."""
        ids = tuple(token_ids)
        with self._lock:
            found = [
                (common_prefix(store.token_ids, ids), digest)
                for digest, store in self._stores.items()
                if (store.key.model, store.key.numerics) == (model, numerics)
            ]
            length, digest = max(found, default=(0, ""))
            if not length:
                return None
            self._stores.move_to_end(digest)
            return self._stores[digest], length

    def add(self, store: PrefixStore) -> bool:
        """Take a finished store; False if it alone is above the limit (it is then not kept)."""
        if self.limit_bytes is not None and store.nbytes > self.limit_bytes:
            return False
        with self._lock:
            self._stores[store.key.digest] = store
            self._stores.move_to_end(store.key.digest)
            while self.limit_bytes is not None and len(self._stores) > 1 and self._total() > self.limit_bytes:
                self._stores.popitem(last=False)
        return True

    def remove(self, key: StoreKey) -> None:
        """Forget a store; requests that are reading it keep it alive until they end."""
        with self._lock:
            self._stores.pop(key.digest, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._stores.clear()

    def _total(self) -> int:
        return sum(store.nbytes for store in self._stores.values())
