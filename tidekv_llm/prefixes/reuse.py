"""What one prompt takes from a store and what it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from tidekv_llm.errors import CacheError
from tidekv_llm.prefixes.base import PrefixKey, StoredPrefix, digest_ids
from tidekv_llm.prefixes.memory import MemoryPrefix
from tidekv_llm.prefixes.pool import PrefixPool

# A shorter common prefix is not worth a look: computing it takes milliseconds.
MINIMUM_TOKENS = 64


@dataclass
class Reuse:
    """One prompt's share in stores.

    Attributes:
        reader: finished store to start from, or None.
        reused: prompt positions taken from it.
        writer: store to fill on the way, or None.
        on_finish: told about the filled store.
        notes: what the user should know.
    """

    reader: StoredPrefix | None = None
    reused: int = 0
    writer: StoredPrefix | None = None
    on_finish: Callable[[StoredPrefix], object] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Positions to keep; 0 once the store has failed."""
        return self.writer.length if self.writer is not None else 0

    @property
    def filled_bytes(self) -> int:
        """Host memory of the store that this prompt has filled."""
        return self.writer.nbytes if self.writer is not None and self.writer.kind == "memory" else 0

    @property
    def host_bytes(self) -> int:
        """Host memory of the store that was filled, or else read."""
        read = self.reader.nbytes if self.reader is not None and self.reader.kind == "memory" else 0
        return self.filled_bytes or read

    def save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep one layer. A store that fails (a full disk) is given up with a note; the answer goes on."""
        if self.writer is None:
            return
        try:
            self.writer.save(layer, keys, values)
        except CacheError as error:
            self._give_up(error)

    def finish(self) -> None:
        """All layers are through."""
        if self.writer is None:
            return
        try:
            self.writer.finish()
        except CacheError as error:
            self._give_up(error)
            return
        if self.on_finish is not None:
            self.on_finish(self.writer)

    def abandon(self) -> None:
        """The request failed or was cancelled: a half-filled store is worth nothing."""
        if self.writer is not None and not self.writer.complete:
            self.writer.discard()

    def _give_up(self, error: CacheError) -> None:
        assert self.writer is not None
        self.writer.discard()
        self.writer = None
        self.notes.append(f"{error}; the next question reads it again")


class PrefixCache(Protocol):
    """Decides what of a prompt is reused and kept."""

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> Reuse:
        """Reuse for a prompt; see :class:`Reuse`."""

    def drop(self, store: StoredPrefix) -> None:
        """Forget a store that turned out to be unreadable."""


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What a store's numbers depend on besides the ids (see :class:`PrefixKey`)."""

    model: str
    numerics: str
    num_layers: int

    def key(self, token_ids: Sequence[int], salt: str = "") -> PrefixKey:
        """The key of a prefix; a salt keeps owners apart."""
        return PrefixKey(self.model, self.numerics, digest_ids(token_ids) + salt)


def reusable(store: StoredPrefix, common: int, prompt_length: int, window_size: int) -> int:
    """Positions a prompt can take from a store: the observation window's queries have to be computed anew."""
    return max(0, min(store.length, common, prompt_length - window_size))


class SharedPrefix:
    """Reuse between consecutive prompts that begin alike, without being told where the document ends.

    A prompt is cut where the common prefix ends, which a fresh prefill does not do: the two agree up to rounding
    (float32: 1e-5), where a session agrees to the bit. So chunk size and attention backend may differ as well.

    Args:
        limit_bytes: most bytes of host memory for stored prefixes; the least recently used go first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.pool = PrefixPool(limit_bytes)

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> Reuse:
        length = len(token_ids)
        keep = max((end for end in boundaries if end < length), default=length)
        reuse = Reuse()
        if found := self.pool.longest(identity.model, token_ids):
            store, common = found
            reused = reusable(store, common, length, window_size)
            if reused >= MINIMUM_TOKENS:
                reuse = Reuse(store, reused)
        # What was mostly there already is not stored a second time.
        worth_keeping = keep >= MINIMUM_TOKENS and reuse.reused < min(keep, length // 2)
        return self._writing(reuse, token_ids[:keep], identity) if worth_keeping else reuse

    def drop(self, store: StoredPrefix) -> None:
        self.pool.remove(store.key)

    def _writing(self, reuse: Reuse, prefix: Sequence[int], identity: PromptIdentity) -> Reuse:
        limit_bytes = self.pool.limit_bytes
        reuse.writer = MemoryPrefix(identity.key(prefix), prefix, identity.num_layers, limit_bytes=limit_bytes)
        reuse.on_finish = self.pool.add
        return reuse
