"""H2O: heavy hitters, the keys that all queries together looked at most (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.attention import TILE_BYTES, AttentionParams, Scratch, mask_future_, softcap_
from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector
from tidekv_llm.errors import SelectorError


class AttentionMass:
    """Attention probability that each key received, summed over all queries so far.

    A chunk's probabilities exist one tile at a time; what stays is ``mass``, float32 [B, Hkv, S], averaged over
    the query heads of a group. Costs about as much as the attention itself.
    """

    def __init__(self, prompt_length: int, tile_bytes: int = TILE_BYTES) -> None:
        self._prompt_length, self._tile_bytes = prompt_length, tile_bytes
        self._scratch = Scratch()
        self.mass: Tensor | None = None

    def add(self, query: Tensor, keys: Tensor, params: AttentionParams) -> None:
        """Count a chunk; see :class:`Accumulator`. Layers with a sliding window are not scored."""
        if params.window is not None:
            return
        batch, heads, count, _ = query.shape
        kv_heads, length = keys.shape[1:3]
        group = heads // kv_heads
        if self.mass is None:
            self.mass = query.new_zeros((batch, kv_heads, self._prompt_length), dtype=torch.float32)
        tile = max(1, self._tile_bytes // (4 * group * length))
        for start in range(0, count, tile):
            stop = min(start + tile, count)
            end = length - count + stop  # keys that the tile's last query may see
            for row in range(batch):
                for head in range(kv_heads):
                    queries = query[row, head * group : (head + 1) * group, start:stop]
                    weights = self._weights(queries, keys[row, head, :end], params)
                    self.mass[row, head, :end] += weights.sum(dim=0).div_(group)

    def _weights(self, queries: Tensor, keys: Tensor, params: AttentionParams) -> Tensor:
        """Softmax rows float32 [G * c, end] of queries [G, c, D], the last c of ``keys`` [end, D]."""
        group, count, dim = queries.shape
        folded = queries.reshape(group * count, dim)
        logits = self._scratch.take("logits", (group * count, keys.shape[0]), folded)
        torch.mm(folded, keys.t(), out=logits)
        weights = self._scratch.take("weights", logits.shape, logits.new_empty(0, dtype=torch.float32))
        softcap_(weights.copy_(logits).mul_(params.scaling), params.softcap)
        mask_future_(weights.view(group, count, -1), keys.shape[0] - count)
        return torch.softmax(weights, dim=-1, out=weights)


@register_selector
@dataclass(frozen=True)
class H2O(Selector):
    """Attention mass over all prompt queries, mean over the group's query heads.

    The original halves its budget between heavy hitters and recent tokens; here the recent part is the mandatory
    window, and the rest of the budget is for heavy hitters. Learned attention sinks (gpt-oss) take no part.
    """

    name: ClassVar[str] = "h2o"

    def accumulator(self, prompt_length: int) -> AttentionMass:
        return AttentionMass(prompt_length)

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        found = layer.accumulated
        if not isinstance(found, AttentionMass) or found.mass is None:
            raise SelectorError(
                "selector 'h2o' needs the queries of the whole prompt, which this schedule does not hand over; "
                "use schedule='tidekv' or another selector"
            )
        mass = found.mass
        return lambda start, stop: mass[:, :, start:stop]
