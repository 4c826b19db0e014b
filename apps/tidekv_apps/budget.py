"""Whether a question fits the context window, before it is asked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidekv_apps.settings import AskSettings
from tidekv_llm.documents import Document, DocumentLayout, lay_out
from tidekv_llm.service import ModelFacts

History = Sequence[tuple[str, str]]
_ANY_DOCUMENT = "x"


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


@dataclass(frozen=True)
class Source:
    """A file of the conversation.

    Attributes:
        whole: all its pages; they are counted together, so that another choice of pages costs nothing.
        chosen: those that go into the prompt.
    """

    whole: Document
    chosen: Document


@dataclass
class _Frame:
    """The prompt around the pages: what one model puts before, between and behind them.

    Attributes:
        model: whose chat template it is.
        layout: of a document that stands for all.
        history: of the last count, and how many tokens it takes.
    """

    model: str
    layout: DocumentLayout
    history: tuple[History, int] = ((), 0)

    @property
    def fixed(self) -> int:
        """Tokens before the pages, and behind them with neither history nor question."""
        return self.layout.spans[0].start + len(self.layout.behind(""))

    def history_tokens(self, history: History) -> int:
        """What the earlier turns take."""
        if self.history[0] != history:
            self.history = history, len(self.layout.behind("", history)) - len(self.layout.behind(""))
        return self.history[1]

    def question_tokens(self, question: str, history: History) -> int:
        """What the question takes behind the earlier turns."""
        return len(self.layout.behind(question, history)) - len(self.layout.behind("", history))


@dataclass
class BudgetCounter:
    """Counts the tokens of every document once: order, choice of pages and question only change sums."""

    _pages: dict[tuple[str, ...], dict[int, int]] = field(default_factory=dict)
    _frame: _Frame | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def forget(self) -> None:
        """The documents are gone."""
        with self._lock:
            self._pages.clear()

    def is_counted(self, sources: Sequence[Source], facts: ModelFacts) -> bool:
        """Whether a budget takes no time that grows with the documents."""
        return all(_key(source, facts, len(sources) > 1) in self._pages for source in sources)

    def count(
        self, sources: Sequence[Source], history: History, settings: AskSettings, facts: ModelFacts, question: str
    ) -> Budget | None:
        """The next question's budget; None without a document."""
        if not sources:
            return None
        with self._lock:
            pages = self._page_tokens(sources, facts)
            frame = self._framed(facts)
            return Budget(
                document=frame.fixed + sum(pages.values()),
                history=frame.history_tokens(history),
                question=frame.question_tokens(question, history) if question.strip() else 0,
                answer=settings.max_new_tokens,
                limit=min(facts.context_window, settings.context_window or facts.context_window),
                page_tokens=pages,
                strategy="best pages" if settings.retrieval else "whole",
            )

    def _page_tokens(self, sources: Sequence[Source], facts: ModelFacts) -> dict[tuple[int, int], int]:
        """Tokens per (document, page) of the chosen pages."""
        several = len(sources) > 1
        self._pages = {key: self._pages[key] for s in sources if (key := _key(s, facts, several)) in self._pages}
        tokens: dict[tuple[int, int], int] = {}
        for at, source in enumerate(sources):
            key = _key(source, facts, several)
            counted = self._pages[key] = self._pages.get(key) or _count_pages(source.whole, facts, named=several)
            tokens |= {(at, page.number): counted[page.number] for page in source.chosen.pages if page.readable}
        return tokens

    def _framed(self, facts: ModelFacts) -> _Frame:
        if self._frame is None or self._frame.model != facts.name:
            document = Document.from_pages([_ANY_DOCUMENT], _ANY_DOCUMENT)
            self._frame = _Frame(facts.name, lay_out(document, facts.tokenizer))
        return self._frame


def _key(source: Source, facts: ModelFacts, several: bool) -> tuple[str, ...]:
    """A page's marker names its file where there are several."""
    return facts.name, source.whole.content_hash, source.whole.name if several else ""


def _count_pages(document: Document, facts: ModelFacts, *, named: bool) -> dict[int, int]:
    layout = lay_out(document, facts.tokenizer, unnamed=0 if named else 1)
    return {span.page: span.stop - span.start for span in layout.spans}
