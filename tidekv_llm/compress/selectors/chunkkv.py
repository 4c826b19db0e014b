"""ChunkKV: whole runs of neighbouring tokens stay or go together (arXiv 2502.00299)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from tidekv_llm.cache.full_layer import Accumulator, FullLayer
from tidekv_llm.compress.scoring import OnceEach
from tidekv_llm.compress.selectors.base import Scorer, Selector, checked_scores, register_selector
from tidekv_llm.compress.selectors.snapkv import SnapKV
from tidekv_llm.config import whole_number
from tidekv_llm.errors import ConfigError


@register_selector
@dataclass(frozen=True)
class ChunkKV(Selector):
    """Every key scores the mean, over its chunk, of the token scores summed over the KV heads.

    Keys of a chunk tie, so the top-k takes them together, the same in all heads; the last ones are cut to fit the
    budget exactly, the later tokens staying (ties go to the later token). Chunks start at position 0, one every
    ``stride`` tokens; the first to reach the observation window is the last, and can be shorter.

    Deviations, on purpose: chunks overlap by half and a key goes by the better of its two, for where a fixed grid
    falls is chance, and a number across two chunks is torn apart (``stride=chunk_length`` is the paper's grid). The
    budget is exact, window and sinks are mandatory, and every batch row has its own chunks (kvpress applies row
    0's to all).

    Args:
        chunk_length: tokens per chunk (20 in kvpress, 10 in the paper's main text).
        stride: tokens from one chunk's start to the next one's; it divides ``chunk_length``. None is half of an
            even ``chunk_length`` and the whole of an odd one.
        reuse_layers: neighbouring layers that share the first one's choice.
        tokens: who scores single tokens.

    Raises:
        ConfigError: a number is not whole or below 1, ``stride`` does not divide ``chunk_length``, or ``tokens`` is
            no selector that gives scores.
    """

    name: ClassVar[str] = "chunkkv"
    query_aware: ClassVar[bool] = True

    chunk_length: int = 20
    stride: int | None = None
    reuse_layers: int = 1
    tokens: Selector = field(default_factory=lambda: SnapKV(pooling="none"))

    def __post_init__(self) -> None:
        whole_number("chunk_length", self.chunk_length, least=1)
        whole_number("reuse_layers", self.reuse_layers, least=1)
        whole_number("stride", self.step, least=1)
        if self.chunk_length % self.step:
            raise ConfigError(
                f"stride={self.stride} must divide chunk_length={self.chunk_length}; use stride={self.chunk_length}"
            )
        if not isinstance(self.tokens, Selector) or type(self.tokens).indices is not Selector.indices:
            raise ConfigError(f"tokens={self.tokens!r} must be a Selector object that scores, such as SnapKV()")

    @property
    def step(self) -> int:
        """The stride in use: half a chunk, or a whole one where it has no half."""
        if self.stride is not None:
            return self.stride
        return self.chunk_length // 2 if self.chunk_length % 2 == 0 else self.chunk_length

    def accumulator(self, prompt_length: int) -> Accumulator | None:
        return self.tokens.accumulator(prompt_length)

    @property
    def needs_all_queries(self) -> bool:
        """Whether what scores single tokens needs them."""
        return self.tokens.needs_all_queries

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        inner, step = self.tokens.scorer(layer, block_size), self.step
        prefix_length = layer.prompt_length - layer.queries.shape[2]
        steps = math.ceil(prefix_length / step)
        width = min(self.chunk_length // step, steps)  # of a chunk, in steps

        def step_sums(first: int, last: int) -> Tensor:
            begin, end = first * step, min(last * step, prefix_length)
            tokens = checked_scores(inner(begin, end), layer, end - begin, self.tokens).sum(dim=1)  # [B, n]
            whole = pad(tokens, (0, -tokens.shape[-1] % step))
            return whole.view(tokens.shape[0], -1, step).sum(dim=-1)

        once = OnceEach(step_sums)

        def scores(start: int, stop: int) -> Tensor:
            first, last = start // step, math.ceil(stop / step)
            # Chunk c covers the steps c to c + width - 1: these are the ones that touch [first, last).
            chunks = range(max(0, first - width + 1), min(last, steps - width + 1))
            sums = once(chunks.start, chunks.stop + width - 1).unfold(-1, width, 1).sum(dim=-1)
            means = sums / _lengths(chunks, step, width, prefix_length, sums.device)
            missing = (chunks.start - (first - width + 1), last - chunks.stop)
            best = max_pool1d(pad(means, missing, value=-math.inf), width, stride=1)  # [B, last - first]
            per_key = best.repeat_interleave(step, dim=-1)[:, start - first * step : stop - first * step]
            return per_key[:, None].expand(-1, layer.kv_heads, -1)

        return scores


def _lengths(chunks: range, step: int, width: int, prefix_length: int, device: torch.device) -> Tensor:
    """Tokens in each chunk: all the same but for the last one, which can end with a shorter step."""
    starts = torch.arange(chunks.start, chunks.stop, device=device) * step
    return (starts + width * step).clamp_max(prefix_length) - starts
