"""Whether a question fits, before it is asked: exact token counts, and the planner's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidekv_apps.engines import ModelFacts
from tidekv_apps.retrieve import choose_pages
from tidekv_apps.settings import AskSettings
from tidekv_llm import planner
from tidekv_llm.documents import Document, build_prompt
from tidekv_llm.errors import TideKVError
from tidekv_llm.memory import available_bytes
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    from tidekv_apps.state import Session

COMPARED = ("tidekv", "post-prefill", "one-shot")
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

    def count(self, session: Session, facts: ModelFacts, question: str) -> Budget | None:
        """The next question's budget; None without a document that is ready."""
        documents = ready_documents(session)
        if not documents:
            return None
        settings = session.settings
        tokens = self._page_tokens(documents, facts)
        limit = min(facts.context_window, settings.context_window or facts.context_window)
        return Budget(
            document=self._document,
            history=_history_tokens(session, facts),
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


def _history_tokens(session: Session, facts: ModelFacts) -> int:
    # A turn's own tokens and the few that the chat template puts around question and answer.
    turns = history_of(session)
    return sum(_plain_tokens(facts, part) + 8 for turn in turns for part in turn)


def history_of(session: Session) -> list[tuple[str, str]]:
    """Earlier questions and answers about the documents as they are now."""
    turns: list[tuple[str, str]] = []
    for turn in session.turns:
        if turn.document_changed:
            turns.clear()
        if turn.state == "done" and turn.answer is not None:
            turns.append((turn.question, turn.text))
    return turns


def ready_documents(session: Session) -> list[Document]:
    """The selected pages of every file that was read."""
    return [document for entry in session.entries if (document := entry.selected()) is not None]


def documents_to_send(session: Session, budget: Budget, question: str) -> list[Document]:
    """All ready documents, or their best pages where retrieval is on and needed."""
    documents = ready_documents(session)
    if budget.fits or not session.settings.retrieval:
        return documents
    # The question is counted already; a page marker may take a token more once fewer files are named.
    pages = sum(budget.page_tokens.values())
    room = pages - (budget.total - budget.limit) - 16
    return choose_pages(documents, question, budget.page_tokens, room)


# --- memory ---------------------------------------------------------------------------------------------


def predict(facts: ModelFacts, tokens: int, settings: AskSettings, schedule: str, chunk: int = 0) -> dict[str, int]:
    """The planner's components of one schedule at its peak, in bytes; empty where it knows none."""
    config = settings.prefill()
    chunk = chunk or planner.choose_chunk_size(facts.shape, tokens, config, facts.device)
    config = config.replace(chunk_size=chunk, schedule="tidekv")
    if schedule not in planner.SCHEDULES:
        return {}
    plan = planner.Plan(facts.shape, tokens, config, device=facts.device, reserve=settings.max_new_tokens)
    return dict(planner.predict(schedule, plan).at_peak)


def predictions(facts: ModelFacts, tokens: int, settings: AskSettings, chunk: int = 0) -> dict[str, dict[str, int]]:
    """Components of the schedules that every answer is compared with."""
    found = {schedule: predict(facts, tokens, settings, schedule, chunk) for schedule in COMPARED}
    return {schedule: parts for schedule, parts in found.items() if parts}


def memory_problem(facts: ModelFacts, tokens: int, settings: AskSettings) -> str:
    """Why the settings cannot run for so many tokens, with the planner's numbers; empty if they can."""
    try:
        parts = predict(facts, tokens, settings, settings.schedule)
    except TideKVError as error:
        return str(error)
    needed = sum(size for name, size in parts.items() if name != "weights")
    free = available_bytes(facts.device)
    if needed <= free:
        return ""
    largest = sorted((size, name) for name, size in parts.items() if name != "weights")[-2:]
    named = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in reversed(largest))
    return (
        f"{settings.schedule} needs {format_bytes(needed)} beside the weights for {tokens:,} tokens ({named}), "
        f"but {format_bytes(free)} are free; lower chunk size or kept tokens, or choose fewer pages"
    )
