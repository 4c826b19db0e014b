"""The compressor: a selector, budgets and a cache layout behind one call per finished layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidekv_llm.cache.rectangular import RectangularLayer
from tidekv_llm.compress.budgets import LAYER_BUDGETS
from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.compress.layer_end import Kept, select_positions
from tidekv_llm.compress.selectors import Selector, make_selector
from tidekv_llm.config import PrefillConfig


@dataclass
class Compressor:
    """One request's layer-end step.

    Args:
        config: budgets, window, sinks and block size.
        num_layers: layers of the model.
        reserve: slots for decoded tokens in every layer's storage.
        prompt_length: S.
    """

    config: PrefillConfig
    num_layers: int
    prompt_length: int
    reserve: int = 0
    selector: Selector = field(init=False)
    budgets: list[int] = field(init=False)
    evidence: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.selector = make_selector(self.config)
        self.budgets = LAYER_BUDGETS[self.config.layer_budget](self.config.kept_tokens, self.num_layers)

    @property
    def window_size(self) -> int:
        """W: how many of the last queries the scheduler keeps."""
        return self.config.window_size

    def compress(self, layer: FullLayer, window: int | None) -> RectangularLayer:
        """Select, gather and store what stays of ``layer``; ``window`` is its sliding window, if it has one."""
        if window is not None:
            kept = _last_positions(layer, window)
            return RectangularLayer(layer.keys, layer.values, kept, reserve=self.reserve, window=window)
        kept_set = select_positions(
            layer,
            self.selector,
            self.budgets[layer.index],
            window_size=self.config.window_size,
            sinks=self.config.sinks,
            block_size=self.config.score_block_size,
        )
        self._add_evidence(kept_set)
        return RectangularLayer(layer.keys, layer.values, kept_set.indices, reserve=self.reserve)

    def _add_evidence(self, kept: Kept) -> None:
        """Sum, per prompt position, the scores it was kept for: where the question looked."""
        if not self.selector.query_aware or kept.scores.numel() == 0:
            return
        if self.evidence is None:
            self.evidence = torch.zeros(self.prompt_length, dtype=torch.float32)
        self.evidence.index_add_(0, kept.scored[0].flatten().cpu(), kept.scores[0].flatten().cpu())


def _last_positions(layer: FullLayer, window: int) -> Tensor:
    """A sliding-window layer keeps exactly its window: selection is for full attention only."""
    first = max(0, layer.prompt_length - window)
    positions = torch.arange(first, layer.prompt_length, device=layer.keys.device)
    return positions.expand(layer.keys.shape[0], layer.kv_heads, -1)
