"""Which pages the cache kept: the evidence strip behind an answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.documents import PageSpan


def kept_per_page(cache: CompressedCache, spans: Sequence[PageSpan], kv_heads: int) -> tuple[tuple[int, ...], ...]:
    """Kept positions in each page's token range, summed over KV heads: one row per layer, one number per span.

    Example: a layer of two heads that kept positions {0, 5} and {5, 6}, spans [0, 4) and [4, 8) give (1, 3).
    """
    if not spans:
        return tuple(() for _ in cache.layers)
    edges = torch.tensor([[span.start, span.stop] for span in spans])
    rows = []
    for layer in cache.layers:
        positions = torch.cat([layer.kept_of(head) for head in range(kv_heads)]).cpu()
        below = torch.searchsorted(positions.sort().values, edges)
        rows.append(tuple((below[:, 1] - below[:, 0]).tolist()))
    return tuple(rows)
