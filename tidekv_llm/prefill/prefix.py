"""A prompt's prefix whose keys and values exist already, or are to be kept for the next question."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PrefixReader(Protocol):
    """Every layer's full keys and values of a prefix, outside the device."""

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [B, Hkv, P, D] and values [B, Hkv, P, Dv] of one layer, on the host."""


class PrefixWriter(Protocol):
    """Takes every layer's keys and values of a prefix while they pass by."""

    @property
    def length(self) -> int:
        """P, prompt positions to keep."""

    def save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep one layer's keys [B, Hkv, P, D] and values [B, Hkv, P, Dv]; they are views, so copy."""
