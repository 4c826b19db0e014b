"""Random finished layers for selector tests."""

from __future__ import annotations

import torch

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.full_layer import FullLayer


def random_layer(
    length: int,
    *,
    window: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    batch: int = 1,
    dim: int = 8,
    seed: int = 0,
    softcap: float | None = None,
) -> FullLayer:
    """A layer with ``min(window, length)`` observation queries and no log-sum-exp from the attention."""
    generator = torch.Generator().manual_seed(seed * 7919 + length)
    return FullLayer(
        index=1,
        num_layers=3,
        keys=torch.randn(batch, kv_heads, length, dim, generator=generator),
        values=torch.randn(batch, kv_heads, length, dim, generator=generator),
        queries=torch.randn(batch, heads, min(window, length), dim, generator=generator) * 2,
        lse=None,
        params=AttentionParams(scaling=0.4, softcap=softcap),
    )
