"""ChunkKV: whole runs of neighbouring tokens stay or go together (arXiv 2502.00299)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.compress.selectors.base import Accumulator, Scorer, Selector
from tidekv_llm.compress.selectors.snapkv import SnapKV


@dataclass(frozen=True)
class ChunkKV(Selector):
    """Every key scores the mean, over its chunk, of the token scores summed over the KV heads.

    All keys of a chunk tie, so the top-k takes whole chunks, the same in all heads; the last one is cut to fit
    the budget exactly, its later tokens staying (ties go to the later token). Chunks count from position 0 to
    the observation window; what remains is a shorter chunk of its own.

    Deviations, on purpose: the budget is exact, window and sinks are mandatory, and every batch row has its own
    chunks (kvpress applies row 0's to all).

    Args:
        chunk_length: tokens per chunk (20 in kvpress, 10 in the paper's main text).
        reuse_layers: neighbouring layers that share the first one's choice.
        tokens: who scores single tokens.
    """

    name: ClassVar[str] = "chunkkv"
    query_aware: ClassVar[bool] = True

    chunk_length: int = 20
    reuse_layers: int = 1
    tokens: Selector = field(default_factory=lambda: SnapKV(pooling="none"))

    def accumulator(self, prompt_length: int) -> Accumulator | None:
        return self.tokens.accumulator(prompt_length)

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        inner, length = self.tokens.scorer(layer, block_size), self.chunk_length
        prefix_length = layer.prompt_length - layer.queries.shape[2]
        # A block can end inside a chunk: its mean is handed on, since computed twice it could differ in the
        # last bit and break the tie between the chunk's tokens.
        last_index, last_mean = -1, layer.keys.new_empty((layer.keys.shape[0], 0), dtype=torch.float32)

        def scores(start: int, stop: int) -> Tensor:
            nonlocal last_index, last_mean
            first, end = start // length, -(-stop // length)
            begin = first + 1 if first == last_index else first
            means = last_mean if begin > first else last_mean[:, :0]
            if begin < end:
                tokens = inner(begin * length, min(end * length, prefix_length)).sum(dim=1)  # [B, n]
                means = torch.cat((means, chunk_means(tokens, length)), dim=-1)
            last_index, last_mean = end - 1, means[:, -1:].clone()
            per_key = means.repeat_interleave(length, dim=-1)[:, start - first * length : stop - first * length]
            return per_key[:, None].expand(-1, layer.kv_heads, -1)

        return scores


def chunk_means(scores: Tensor, length: int) -> Tensor:
    """Mean of every run of ``length`` scores [B, n], the last one possibly shorter: [B, ceil(n / length)]."""
    count = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -count % length))
    sums = padded.view(scores.shape[0], -1, length).sum(dim=-1)
    sizes = torch.full_like(sums[0], length)
    sizes[-1] = count - (sums.shape[-1] - 1) * length
    return sums / sizes
