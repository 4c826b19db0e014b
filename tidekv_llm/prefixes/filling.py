"""Filling a stored prefix while a prompt's keys and values pass by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv_llm.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from tidekv_llm.prefixes.base import StoredPrefix


class Filling:
    """Writes a prompt's prefix (a :class:`tidekv_llm.prefill.prefix.PrefixWriter`).

    A store that fails (a full disk) is given up with a note; the answer goes on.

    Args:
        store: to be filled.
    """

    def __init__(self, store: StoredPrefix) -> None:
        self._store: StoredPrefix | None = store
        self.notes: list[str] = []

    @property
    def length(self) -> int:
        """Positions to keep; 0 once the store has failed."""
        return self._store.length if self._store is not None else 0

    @property
    def host_bytes(self) -> int:
        """Host memory that it has taken so far."""
        return self._store.host_bytes if self._store is not None else 0

    def save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep one layer."""
        if self._store is None:
            return
        try:
            self._store.save(layer, keys, values)
        except CacheError as error:
            self._give_up(error)

    def finish(self) -> StoredPrefix | None:
        """All layers are through: the finished prefix, None if it has failed."""
        if self._store is None:
            return None
        try:
            self._store.finish()
        except CacheError as error:
            self._give_up(error)
        return self._store

    def abandon(self) -> None:
        """The request is over: a half-filled store is worth nothing."""
        if self._store is not None and not self._store.complete:
            self._store.discard()

    def _give_up(self, error: CacheError) -> None:
        assert self._store is not None
        self._store.discard()
        self._store = None
        self.notes.append(f"{error}; the next question reads it again")
