"""A session's own stored prefix: found by its exact document part, never shared with another session in memory."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from tidekv_llm.errors import CacheError
from tidekv_llm.prefixes.base import StoredPrefix
from tidekv_llm.prefixes.disk import DiskPrefix
from tidekv_llm.prefixes.memory import MemoryPrefix
from tidekv_llm.prefixes.named import shrink
from tidekv_llm.prefixes.plan import PromptIdentity, ReusePlan, reusable
from tidekv_llm.prefixes.pool import PrefixPool

_EVICTED = "the stored document was evicted (a limit on bytes) or removed meanwhile; it was read again"


class SessionPrefix:
    """The session's own store: found by its exact document part, never shared with another session in memory."""

    def __init__(self, pool: PrefixPool, folder: Path | None, *, int8: bool, limit_bytes: int | None) -> None:
        self.document: tuple[int, ...] = ()
        self._pool, self._folder, self._int8, self._limit_bytes = pool, folder, int8, limit_bytes
        # Two sessions on the same document must not be able to tell by the time it takes.
        self._salt = "" if folder else uuid.uuid4().hex
        self._store: StoredPrefix | None = None
        self._closed = False

    @property
    def on_disk(self) -> bool:
        return self._folder is not None

    @property
    def nbytes(self) -> int:
        return self._store.nbytes if self._store is not None and self._store.complete else 0

    def exists(self, identity: PromptIdentity) -> bool:
        """Whether there is a folder for the documents on disk."""
        return self._folder is not None and (self._folder / identity.key(self.document).digest).is_dir()

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> ReusePlan:
        """Read the store if it is there; else fill one, starting from what an earlier, shorter one holds."""
        if self._closed:  # by another thread: nothing may be stored any more
            return ReusePlan()
        before, notes = self._store, tuple[str, ...]()
        try:
            store = self._find(identity)
        except CacheError as error:
            store, notes = None, (f"{error}; it was read again",)
        if store is not None:
            return ReusePlan(store, reusable(store, store.length, len(token_ids), window_size))
        writer = self._new_store(identity)
        if before is None:
            return ReusePlan(writer=writer, notes=notes)
        if self._is_prefix(before, identity):
            return ReusePlan(before, reusable(before, before.length, len(token_ids), window_size), writer, notes)
        return ReusePlan(writer=writer, notes=notes or (_EVICTED,))

    def keep(self, store: StoredPrefix) -> None:
        before, self._store = self._store, None if self._closed else store
        if before is not None and before.key != store.key:
            self._pool.remove(before.key)
        if isinstance(store, DiskPrefix):
            if self._limit_bytes is not None:
                shrink(self._limit_bytes, keep=store.folder)
        elif not self._closed:
            self._pool.add(store)

    def drop(self, store: StoredPrefix) -> None:
        self._pool.remove(store.key)
        store.discard()
        self._store = None

    def close(self) -> None:
        """Let go of the store. A question that another thread has in work may read on: it holds the memory itself."""
        self._closed = True
        if self._store is not None:
            self._pool.remove(self._store.key)
            self._store = None

    def _find(self, identity: PromptIdentity) -> StoredPrefix | None:
        key = identity.key(self.document, self._salt)
        if self._folder is None:
            return self._pool.get(key)
        if self._store is not None and self._store.key == key and self._store.complete and self.exists(identity):
            return self._store
        found = DiskPrefix.find(key, self.document, identity.num_layers, root=self._folder)
        self._store = found or self._store
        return found

    def _is_prefix(self, store: StoredPrefix, identity: PromptIdentity) -> bool:
        """Whether the store from before :meth:`Session.append` still serves: there, and of the same numbers."""
        same = (store.key.model, store.key.numerics) == (identity.model, identity.numerics)
        there = store.complete and store.length < len(self.document)
        return same and there and self.document[: store.length] == store.token_ids

    def _new_store(self, identity: PromptIdentity) -> StoredPrefix:
        key = identity.key(self.document, self._salt)
        if self._folder is not None:
            return DiskPrefix(key, self.document, identity.num_layers, root=self._folder)
        limit_bytes = self._pool.limit_bytes
        return MemoryPrefix(key, self.document, identity.num_layers, int8=self._int8, limit_bytes=limit_bytes)
