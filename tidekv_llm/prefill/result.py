"""What a prefill gives: the cache as a schedule built it, and the whole that the decode loop takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Construction:
    """What a schedule built of a prompt.

    Attributes:
        cache: the decode cache.
        hidden: last layer's hidden states before the final norm: of the last token [B, 1, d_model], or of all
            [B, S, d_model] with ``task.all_outputs``.
        evidence: see :class:`Prefilled`.
    """

    cache: CompressedCache
    hidden: Tensor
    evidence: Tensor | None = None


@dataclass(slots=True)
class Prefilled:
    """A prompt, encoded.

    Attributes:
        cache: the compressed decode cache.
        logits: float32 [vocab], of the token after the prompt.
        next_position: true absolute position of that token, the prompt's length.
        metrics: times and bytes of the construction.
        evidence: float32 [S], the scores each prompt position was kept for, summed over layers and KV heads;
            None if the selector does not look from the question.
        hidden: last layer's hidden states before the final norm, [1, d_model] of the last token or [S, d_model]
            of all if they were asked for.
    """

    cache: CompressedCache
    logits: Tensor
    next_position: int
    metrics: Metrics
    evidence: Tensor | None
    hidden: Tensor
