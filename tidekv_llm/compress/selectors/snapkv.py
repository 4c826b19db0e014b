"""SnapKV: what the last prompt tokens look at (paper, Eqs. 4-8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.scoring import OnceEach, pool, query_weights, window_lse, window_weights
from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector
from tidekv_llm.config import PrefillConfig
from tidekv_llm.passages import Passages


@register_selector
@dataclass(frozen=True)
class SnapKV(Selector):
    """Mean attention of the observation window, averaged over the group's query heads, then pooled.

    Deviations from the original, on purpose: selection is per KV head (the original repeats KV per query head,
    which inflates the cache), the pooling comes after the mean over the group, and sinks are mandatory. Keys of
    the window itself are mandatory too and take no part in the pooling.

    Args:
        kernel_size: odd width of the pooling.
        pooling: ``"max"``, ``"avg"``, ``"none"``, or ``"passage"``: every key of a line or sentence scores as its best
            one, so that it stays or goes as a whole. Where the text is not known (ids without a tokenizer, layers
            that are not the whole prompt) this is ``"max"``.
        weights: Eq. 7's w_q: ``"uniform"`` 1/W each, or ``"recency"``, rising linearly to the last query.
    """

    name: ClassVar[str] = "snapkv"
    query_aware: ClassVar[bool] = True

    kernel_size: int = 21
    pooling: str = "max"
    weights: str = "uniform"

    @classmethod
    def from_config(cls, config: PrefillConfig) -> SnapKV:
        return cls(kernel_size=config.kernel_size, pooling=config.pooling, weights=config.weights)

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        lse = window_lse(layer, block_size)
        share = query_weights(layer.queries.shape[2], self.weights, layer.keys.device)
        prefix_length = layer.prompt_length - layer.queries.shape[2]
        halo = 0 if self.pooling == "none" else self.kernel_size // 2

        def weights(start: int, stop: int) -> Tensor:
            attention = window_weights(layer, lse, start, stop)  # [B, Hkv, G, W, n]
            return torch.einsum("bhgwn,w->bhn", attention, share) / layer.group_size

        once = OnceEach(weights)
        if self.pooling == "passage" and layer.passages is not None:
            return _by_passage(once, layer.passages, prefix_length)

        def scores(start: int, stop: int) -> Tensor:
            # Neighbours on both sides take part in the pooling, as far as the prefix goes.
            left, right = max(0, start - halo), min(prefix_length, stop + halo)
            return pool(once(left, right), self.kernel_size, self.pooling)[..., start - left : stop - left]

        return scores


def _by_passage(weights: OnceEach, passages: Passages, prefix_length: int) -> Scorer:
    """Scores of keys [start, stop) from the weights of all passages that they touch."""

    def scores(start: int, stop: int) -> Tensor:
        left, right = passages.around(start, stop)
        best = passages.highest(weights(left, min(right, prefix_length)), left)
        return best[..., start - left : stop - left]

    return scores
