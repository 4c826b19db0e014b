"""Choosing the next token: what changes its logits, and how it is drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tidekv_llm.errors import ConfigError
from tidekv_llm.options import Sampling

Processor = Callable[[Tensor, Tensor], Tensor]
"""Of the answer's ids int64 [1, n] and the next token's logits [1, vocab]: logits. transformers' own are some."""


class Sampler:
    """Draws tokens; one per request, so that its seed's sequence and its text so far are its own."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(int(sampling.seed))
        self._processors = _processors(sampling)
        self._said: list[int] = []

    def __call__(self, logits: Tensor) -> int:
        """The next token from float32 logits [vocab]."""
        token = self._draw(self._processed(logits) if self._processors else logits)
        self._said.append(token)
        return token

    def _draw(self, logits: Tensor) -> int:
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        # Sampled on the CPU: the same seed gives the same text on every device.
        probabilities = self._filtered((logits / self._sampling.temperature).cpu()).softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _processed(self, logits: Tensor) -> Tensor:
        vocabulary = logits.shape[-1]
        if (unknown := max(self._sampling.logit_bias, default=0)) >= vocabulary:
            raise ConfigError(f"logit_bias has {unknown}, which is outside the vocabulary of {vocabulary:,}")
        ids, scores = torch.tensor([self._said], dtype=torch.int64, device=logits.device), logits[None].clone()
        for processor in self._processors:
            scores = processor(ids, scores)
        if not bool((scores > -torch.inf).any()):
            raise ConfigError(f"after {len(self._said)} tokens the grammar forbids every token; let it end the answer")
        return scores[0]

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
        if self._sampling.min_p > 0:
            from transformers.generation.logits_process import MinPLogitsWarper

            empty = torch.empty((1, 0), dtype=torch.int64)
            logits = MinPLogitsWarper(self._sampling.min_p)(empty, logits[None])[0]
        return logits


def _processors(sampling: Sampling) -> list[Processor]:
    """What changes the logits before a token is drawn, the grammar last: what it forbids stays forbidden."""
    found: list[Processor] = []
    if sampling.repetition_penalty != 1:
        from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.presence_penalty or sampling.frequency_penalty:
        found.append(_count_penalty(sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.logit_bias:
        found.append(_bias(sampling.logit_bias))
    if sampling.grammar is not None:
        found.append(sampling.grammar())
    return found


def _bias(biases: Mapping[int, float]) -> Processor:
    """Added to the logits of tokens; transformers' own refuses token 0 before 5.24."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        tokens = torch.tensor([int(token) for token in biases], device=scores.device)
        return scores.index_add(1, tokens, scores.new_tensor([float(bias) for bias in biases.values()])[None])

    return process


def _count_penalty(presence: float, frequency: float) -> Processor:
    def process(ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, ids, torch.ones_like(ids, dtype=scores.dtype))
        return scores - frequency * counts - presence * (counts > 0)

    return process
