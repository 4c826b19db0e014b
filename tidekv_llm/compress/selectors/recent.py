"""StreamingLLM: the first positions and the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector


@register_selector
@dataclass(frozen=True)
class Recent(Selector):
    """The later a position, the higher its score; the sinks are mandatory (``PrefillConfig.sinks``)."""

    name: ClassVar[str] = "recent"

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        def scores(start: int, stop: int) -> Tensor:
            # Positions fit float32 exactly up to 16.7 million.
            positions = torch.arange(start, stop, device=layer.keys.device, dtype=torch.float32)
            return positions.expand(layer.keys.shape[0], layer.kv_heads, -1)

        return scores
