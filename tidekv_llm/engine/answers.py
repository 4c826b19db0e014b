"""What comes back: generations, answers, and their streams of text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from tidekv_llm.decode.reasoning import Delta
from tidekv_llm.documents import Citation, Prompt
from tidekv_llm.metrics import Metrics


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model found a token, by its own logits: before temperature, penalties and grammar.

    Attributes:
        token_id: what was said.
        logprob: its log-probability.
        alternatives: the most likely tokens with theirs, best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: the answer, without special tokens and reasoning, cut before a stop string.
        reasoning: what the model thought before, where it marks that; else empty.
        token_ids: what was sampled, the end-of-sequence token not included.
        finish_reason: ``"stop"`` (end of sequence or a stop string) or ``"length"``.
        metrics: times and bytes.
        logprobs: one for each of ``token_ids``, where they were asked for.
    """

    text: str
    reasoning: str
    token_ids: list[int]
    finish_reason: str
    metrics: Metrics
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer about documents.

    Attributes:
        text: the answer.
        reasoning: what the model thought before, where it marks that; it is neither cited nor remembered.
        citations: pages it rests on, each saying how that was found.
        metrics: times and bytes.
        prompt_tokens: tokens of the whole prompt; nothing was cut.
        finish_reason: ``"stop"`` or ``"length"``.
        warnings: pages that could not be read, and the like.
        prompt: the prompt, with each page's token range.
        evidence: float32 [S], the scores each prompt position was kept for; None for query-agnostic selectors.
        page_strip_by_layer: kept positions per page (``prompt.spans``), one row per layer, summed over KV heads.
        logprobs: of each token, reasoning included, where they were asked for.
    """

    text: str
    reasoning: str
    citations: tuple[Citation, ...]
    metrics: Metrics
    prompt_tokens: int
    finish_reason: str
    warnings: tuple[str, ...]
    prompt: Prompt
    evidence: Tensor | None
    page_strip_by_layer: tuple[tuple[int, ...], ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def page_strip(self) -> tuple[int, ...]:
        """Kept positions per page, summed over layers and KV heads."""
        return tuple(sum(column) for column in zip(*self.page_strip_by_layer, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The answer, its citations and figures as JSON types; the prompt's ids and the evidence are left out."""
        return {
            "answer": self.text,
            "reasoning": self.reasoning,
            "finish_reason": self.finish_reason,
            "citations": [citation.as_dict() for citation in self.citations],
            "prompt_tokens": self.prompt_tokens,
            "warnings": list(self.warnings),
            "metrics": self.metrics.as_dict(),
            **({"logprobs": [asdict(each) for each in self.logprobs]} if self.logprobs else {}),
        }


OnText = Callable[[str], None]
Result = TypeVar("Result", Generation, Answer)


Deltas = Generator[Delta, None, Result]
"""Pieces of output, and what they make up."""


class _Stream(Generic[Result]):
    """Text deltas that end with a result; iterating skips the reasoning, :meth:`parts` does not."""

    def __init__(self, deltas: Deltas[Result]) -> None:
        self._deltas: Deltas[Result] = deltas
        self._result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(part.text for part in self.parts() if part.text)

    def parts(self) -> Iterator[Delta]:
        """Pieces as they come, each with its ``text`` and its ``reasoning``, one of them mostly empty."""
        while True:
            try:
                part = next(self._deltas)
            except StopIteration as end:
                self._result = self._result if end.value is None else end.value
                return
            yield part

    def close(self) -> None:
        """Stop generating and release the cache."""
        self._deltas.close()

    def drain(self, on_text: OnText | None = None, on_reasoning: OnText | None = None) -> Result:
        """Run to the end, telling each delta to whom it concerns, and return the result."""
        for part in self.parts():
            if on_text is not None and part.text:
                on_text(part.text)
            if on_reasoning is not None and part.reasoning:
                on_reasoning(part.reasoning)
        assert self._result is not None
        return self._result

    @property
    def metrics(self) -> Metrics | None:
        """Figures of the finished generation, None before."""
        return self._result.metrics if self._result else None


class Stream(_Stream[Generation]):
    """Text deltas of a generation; :attr:`generation` holds the whole once they are through."""

    @property
    def generation(self) -> Generation | None:
        """The finished generation, None before."""
        return self._result


class AnswerStream(_Stream[Answer]):
    """Text deltas of an answer; :attr:`answer` holds the whole once they are through."""

    @property
    def answer(self) -> Answer | None:
        """The finished answer, None before."""
        return self._result
