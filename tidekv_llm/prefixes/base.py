"""What all stores have in common."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What the numbers in a store depend on: another key, another store.

    Attributes:
        model: identity of the weights, dtype and rope settings.
        numerics: chunk size and attention backend, which decide the rounding.
        token_ids: digest of the prefix.
    """

    model: str
    numerics: str
    token_ids: str

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        text = "\n".join((self.model, self.numerics, self.token_ids))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def digest_ids(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids as 64-bit numbers."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids two prompts share."""
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(index for index in range(limit) if first[index] != second[index])


class StoredPrefix(ABC):
    """Full keys and values of a prefix, layer by layer; written once, then read any number of times.

    It is a :class:`tidekv_llm.prefill.prefix.PrefixWriter` until :meth:`finish`, and a ``PrefixReader`` after it.

    Args:
        key: what the content depends on.
        token_ids: the prefix, P ids.
        num_layers: layers of the model.
    """

    def __init__(self, key: PrefixKey, token_ids: Sequence[int], num_layers: int) -> None:
        self.key = key
        self.token_ids = tuple(token_ids)
        self.num_layers = num_layers
        self.complete = False

    @property
    def length(self) -> int:
        """P, positions in the store."""
        return len(self.token_ids)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the store takes where it lives."""

    @property
    def host_bytes(self) -> int:
        """Bytes that it takes of host memory."""
        return 0

    @abstractmethod
    def save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy one layer in."""

    @abstractmethod
    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, on the host."""

    def finish(self) -> None:
        """All layers are saved: from now on the store can be read."""
        self.complete = True

    @abstractmethod
    def discard(self) -> None:
        """Give the memory or the files back."""
