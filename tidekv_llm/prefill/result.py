"""What a prefill hands to the decode loop."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.metrics import Metrics


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
