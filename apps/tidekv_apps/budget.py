"""Whether a question fits the context window, before it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidekv_apps.settings import AskSettings
from tidekv_llm.documents import Document, build_prompt
from tidekv_llm.service import ModelFacts

_ANY_QUESTION = "?"


@dataclass(frozen=True)
class Budget:
    """Tokens of the next question.

    Attributes:
        document: instructions and pages.
        history: earlier turns.
        question: what is typed so far.
        answer: reserved for the answer.
        limit: the context window.
        page_tokens: per (document, page) of the ready documents.
        strategy: "whole" or "best pages".
    """

    document: int
    history: int
    question: int
    answer: int
    limit: int
    page_tokens: dict[tuple[int, int], int]
    strategy: str = "whole"

    @property
    def total(self) -> int:
        """Everything together."""
        return self.document + self.history + self.question + self.answer

    @property
    def fits(self) -> bool:
        """Whether it fits the window."""
        return self.total <= self.limit


class BudgetCounter:
    """Counts once per set of documents; a longer question only adds its own tokens."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], int] = {}
        self._document = 0
        self._key: tuple[Any, ...] = ()

    def forget(self) -> None:
        """The documents are gone."""
        self._tokens, self._key = {}, ()

    def count(
        self,
        documents: Sequence[Document],
        history: Sequence[tuple[str, str]],
        settings: AskSettings,
        facts: ModelFacts,
        question: str,
    ) -> Budget | None:
        """The next question's budget; None without a document."""
        if not documents:
            return None
        tokens = self._page_tokens(documents, facts)
        limit = min(facts.context_window, settings.context_window or facts.context_window)
        return Budget(
            document=self._document,
            history=_history_tokens(history, facts),
            question=_plain_tokens(facts, question),
            answer=settings.max_new_tokens,
            limit=limit,
            page_tokens=tokens,
            strategy="best pages" if settings.retrieval else "whole",
        )

    def _page_tokens(self, documents: Sequence[Document], facts: ModelFacts) -> dict[tuple[int, int], int]:
        key = (facts.name, *(document.content_hash for document in documents), *(d.name for d in documents))
        if key != self._key:
            prompt = build_prompt(documents, _ANY_QUESTION, facts.tokenizer)
            self._tokens = {(span.document, span.page): span.stop - span.start for span in prompt.spans}
            self._document = len(prompt) - 1
            self._key = key
        return self._tokens


def _plain_tokens(facts: ModelFacts, text: str) -> int:
    if not text.strip():
        return 0
    return len(facts.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _history_tokens(history: Sequence[tuple[str, str]], facts: ModelFacts) -> int:
    # A turn's own tokens and the few that the chat template puts around question and answer.
    return sum(_plain_tokens(facts, part) + 8 for turn in history for part in turn)
