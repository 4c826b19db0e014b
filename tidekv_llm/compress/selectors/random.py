"""Random: the control that every selector must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector

_MIX = (0x2127599BF4325C37, 0x1CE4E5B9BF58476D)  # odd multipliers of a 64-bit avalanche
_ROW, _LAYER, _LENGTH = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


@register_selector
@dataclass(frozen=True)
class Random(Selector):
    """A hash of seed, layer, prompt length, batch row, head and position: the same in every run and block."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        batch, heads = layer.keys.shape[:2]
        rows = torch.arange(batch * heads, device=layer.keys.device).view(batch, heads, 1) * _ROW
        rows += (self.seed << 40) + layer.index * _LAYER + layer.prompt_length * _LENGTH

        def scores(start: int, stop: int) -> Tensor:
            positions = torch.arange(start, stop, device=layer.keys.device)
            return _uniform(_scramble(rows) + positions)

        return scores


def _scramble(numbers: Tensor) -> Tensor:
    """Scramble int64 values; products wrap around."""
    for factor in _MIX:
        numbers = (numbers ^ (numbers >> 29)) * factor
    return numbers ^ (numbers >> 32)


def _uniform(numbers: Tensor) -> Tensor:
    """Float32 in [0, 1) from the lowest 24 bits of the scrambled numbers."""
    return (_scramble(numbers) & 0xFFFFFF).float() / 2**24
