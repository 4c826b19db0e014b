"""What one prompt takes from a stored prefix, and which prefix it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidekv_llm.prefixes.base import PrefixKey, StoredPrefix, digest_ids


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """One prompt's share in stored prefixes.

    Attributes:
        reader: finished prefix to start from, or None.
        reused: prompt positions taken from it.
        writer: prefix to fill on the way, or None.
        notes: what the user should know.
    """

    reader: StoredPrefix | None = None
    reused: int = 0
    writer: StoredPrefix | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """What a stored prefix's numbers depend on besides the ids (see :class:`PrefixKey`)."""

    model: str
    numerics: str
    num_layers: int

    def key(self, token_ids: Sequence[int], salt: str = "") -> PrefixKey:
        """The key of a prefix; a salt keeps owners apart."""
        return PrefixKey(self.model, self.numerics, digest_ids(token_ids) + salt)


class PrefixCache(Protocol):
    """Decides what of a prompt is reused and kept."""

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> ReusePlan:
        """The plan for a prompt whose documents end at ``boundaries``."""

    def keep(self, store: StoredPrefix) -> None:
        """Take a prefix that a prompt has filled."""

    def drop(self, store: StoredPrefix) -> None:
        """Forget a prefix that turned out to be unreadable."""


def reusable(store: StoredPrefix, common: int, prompt_length: int, window_size: int) -> int:
    """Positions a prompt can take from a prefix: the observation window's queries have to be computed anew."""
    return max(0, min(store.length, common, prompt_length - window_size))
