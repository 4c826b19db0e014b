"""What comes back: generations, answers, and their streams of text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from tidekv_llm.documents import Citation, Prompt
from tidekv_llm.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: the answer, without special tokens, cut before a stop string.
        token_ids: what was sampled, the end-of-sequence token not included.
        finish_reason: ``"stop"`` (end of sequence or a stop string) or ``"length"``.
        metrics: times and bytes.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer about documents.

    Attributes:
        text: the answer.
        citations: pages it rests on, each saying how that was found.
        metrics: times and bytes.
        prompt_tokens: tokens of the whole prompt; nothing was cut.
        finish_reason: ``"stop"`` or ``"length"``.
        warnings: pages that could not be read, and the like.
        prompt: the prompt, with each page's token range.
        evidence: float32 [S], the scores each prompt position was kept for; None for query-agnostic selectors.
        page_strip_by_layer: kept positions per page (``prompt.spans``), one row per layer, summed over KV heads.
    """

    text: str
    citations: tuple[Citation, ...]
    metrics: Metrics
    prompt_tokens: int
    finish_reason: str
    warnings: tuple[str, ...]
    prompt: Prompt
    evidence: Tensor | None
    page_strip_by_layer: tuple[tuple[int, ...], ...]

    @property
    def page_strip(self) -> tuple[int, ...]:
        """Kept positions per page, summed over layers and KV heads."""
        return tuple(sum(column) for column in zip(*self.page_strip_by_layer, strict=True))


Result = TypeVar("Result", Generation, Answer)


class Deltas(Generic[Result]):
    """Text deltas that end with a result."""

    def __init__(self, deltas: Generator[str, None, Result]) -> None:
        self._deltas: Generator[str, None, Result] = deltas
        self._result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._deltas)
        except StopIteration as end:
            if end.value is not None:
                self._result = end.value
            raise

    def close(self) -> None:
        """Stop generating and release the cache."""
        self._deltas.close()

    def drain(self, on_text: Callable[[str], None] | None = None) -> Result:
        """Run to the end, telling ``on_text`` each delta, and return the result."""
        for delta in self:
            if on_text is not None:
                on_text(delta)
        assert self._result is not None
        return self._result

    @property
    def metrics(self) -> Metrics | None:
        """Figures of the finished generation, None before."""
        return self._result.metrics if self._result else None


class Stream(Deltas[Generation]):
    """Text deltas of a generation; :attr:`generation` holds the whole once they are through."""

    @property
    def generation(self) -> Generation | None:
        """The finished generation, None before."""
        return self._result


class AnswerStream(Deltas[Answer]):
    """Text deltas of an answer; :attr:`answer` holds the whole once they are through."""

    @property
    def answer(self) -> Answer | None:
        """The finished answer, None before."""
        return self._result
