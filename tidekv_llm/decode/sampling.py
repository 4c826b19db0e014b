"""Choosing the next token."""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_llm.options import Sampling


class Sampler:
    """Draws tokens; one per request, so that its seed's sequence is its own."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(int(sampling.seed))

    def __call__(self, logits: Tensor) -> int:
        """The next token from float32 logits [vocab]."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        # Sampled on the CPU: the same seed gives the same text on every device.
        probabilities = self._filtered((logits / self._sampling.temperature).cpu()).softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _filtered(self, logits: Tensor) -> Tensor:
        if 0 < self._sampling.top_k < logits.shape[-1]:
            # By place, not by value: bf16 logits tie often, and a tie must not let more than top_k in.
            best = logits.topk(self._sampling.top_k)
            logits = torch.full_like(logits, -torch.inf).scatter(0, best.indices, best.values)
        if self._sampling.top_p < 1:
            ordered, order = logits.sort(descending=True)
            probabilities = ordered.softmax(dim=-1)
            # A token goes if those before it already reach top_p; the first one always stays.
            beyond = probabilities.cumsum(dim=-1) - probabilities >= self._sampling.top_p
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), -torch.inf)
        return logits
