"""Expected attention: what a typical query would look at, whatever the question (arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.scoring import blocks
from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector
from tidekv_llm.errors import SelectorError


class QueryMoments:
    """Mean and covariance of a layer's rotated queries, gathered chunk by chunk in float64."""

    def __init__(self) -> None:
        self._count = 0
        self._sum: Tensor | None = None
        self._products: Tensor | None = None

    def add(self, query: Tensor, keys: Tensor, params: AttentionParams) -> None:
        """Count a chunk's queries [B, Hq, C, D]; see :class:`Accumulator`."""
        wide = query.float()
        total, products = wide.sum(dim=2).double(), (wide.transpose(-1, -2) @ wide).double()
        self._count += query.shape[2]
        self._sum = total if self._sum is None else self._sum + total
        self._products = products if self._products is None else self._products + products

    @property
    def filled(self) -> bool:
        """Whether any query was seen."""
        return self._count > 0

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean float32 [B, Hq, D] and covariance float32 [B, Hq, D, D]."""
        assert self._sum is not None
        assert self._products is not None
        mean = self._sum / self._count
        covariance = self._products / self._count - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return mean.float(), covariance.float()


@register_selector
@dataclass(frozen=True)
class ExpectedAttention(Selector):
    """(softmax over i of m.k_i * scaling + k_i' C k_i * scaling**2 / 2, + epsilon) * |v_i|.

    m and C are the mean and covariance of the queries, one pair per query head; the softmax is averaged over the
    group. Deviations, on purpose: the original averages its queries before RoPE and rotates the mean to the
    next positions; here all prompt queries count as they are, rotated, which damps the fast rotating channels
    just so. Window and sinks are mandatory. Softcapping is ignored.

    Args:
        use_covariance: with the second-order term.
        use_value_norm: scale by the length of the value.
        epsilon: added to the expected attention before that.
    """

    name: ClassVar[str] = "expected-attention"

    use_covariance: bool = True
    use_value_norm: bool = True
    epsilon: float = 0.0

    def accumulator(self, prompt_length: int) -> QueryMoments:
        return QueryMoments()

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        if not isinstance(layer.accumulated, QueryMoments) or not layer.accumulated.filled:
            raise SelectorError(
                "selector 'expected-attention' needs the queries of the whole prompt, which this schedule does "
                "not hand over; use schedule='tidekv' or another selector"
            )
        mean, covariance = layer.accumulated.moments()
        grouped = (layer.keys.shape[0], layer.kv_heads, layer.group_size)
        mean = mean.view(*grouped, -1) * layer.params.scaling
        covariance = covariance.view(*grouped, *covariance.shape[2:]) * (layer.params.scaling**2 / 2)

        def logits(start: int, stop: int) -> Tensor:
            keys = layer.keys[:, :, start:stop].float()
            expected = torch.einsum("bhgd,bhnd->bhgn", mean, keys)
            if self.use_covariance:
                spread = torch.matmul(keys.unsqueeze(2), covariance)  # [B, Hkv, G, n, D]
                expected += (spread * keys.unsqueeze(2)).sum(dim=-1)
            return expected

        lse = mean.new_full((*grouped, 1), -torch.inf)
        for block in blocks(layer.prompt_length, block_size):
            lse = torch.logaddexp(lse, logits(*block).logsumexp(dim=-1, keepdim=True))

        def scores(start: int, stop: int) -> Tensor:
            attention = (logits(start, stop) - lse).exp().mean(dim=2) + self.epsilon
            if self.use_value_norm:
                attention = attention * layer.values[:, :, start:stop].float().norm(dim=-1)
            return attention

        return scores
