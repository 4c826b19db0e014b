"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_llm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from its logits.

    Args:
        temperature: 0 takes the most likely token; above 0 divides the logits.
        top_p: smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: that many most likely tokens; 0 keeps all.
        seed: makes draws repeatable; None draws a fresh one.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be at least 0; 0 takes the most likely token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps all tokens")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be at least 0; 0 keeps all tokens")


class Sampler:
    """Draws tokens; one per request, so that its seed's sequence is its own."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

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
