"""A question about documents: whole pages go into the prompt, an answer with citations and a report comes back.

The prompt is the one of :meth:`TideKV.ask`: documents first, question last, so that later questions on the same
documents find the same prefix. Nothing is ever cut inside a page: either a page is in the prompt or the report
says that it is not.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tidekv_llm.decode.reasoning import Delta
from tidekv_llm.documents import DEFAULT_INSTRUCTIONS, Citation, Document, PageSpan, build_prompt
from tidekv_llm.documents.loaded import Corpus
from tidekv_llm.documents.ranking import Place, fill_room, only_pages, ranked_pages
from tidekv_llm.errors import ConfigError, ContextOverflowError, TideKVError
from tidekv_llm.service.joining import JoinableCall, Tell, Waiter
from tidekv_llm.service.requests import CallOptions, Emit, ModelCall, Reply

if TYPE_CHECKING:
    from tidekv_llm.engine import Answer, TideKV
    from tidekv_llm.engine.together import Outcome

Overflow = Literal["error", "retrieve"]


@dataclass(frozen=True)
class DocumentRequest:
    """A question about documents.

    Args:
        corpus: the pages.
        question: what the user asks.
        history: earlier (question, answer) pairs.
        instructions: what the model should do with the documents; None for the default.
        overflow: ``"error"``, or ``"retrieve"`` to leave the least relevant pages out.
        order: indices of the loader's items, best first, from the caller's own retriever; None for BM25.
    """

    corpus: Corpus
    question: str
    history: tuple[tuple[str, str], ...] = ()
    instructions: str | None = None
    overflow: Overflow = "error"
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.overflow not in ("error", "retrieve"):
            raise ConfigError(f"overflow={self.overflow!r} is unknown; choose 'error' or 'retrieve'")
        if not isinstance(self.question, str) or not self.question.strip():
            raise ConfigError("the question is empty; ask something about the documents")

    def as_text(self) -> str:
        """The whole request for a reader of traces; its digest makes it distinct in an answer cache."""
        pages = [
            f"[{name} p. {page.label}]\n{page.text}"
            for name, document in zip(self.corpus.names, self.corpus.documents, strict=True)
            for page in document.pages
        ]
        turns = [text for turn in self.history for text in turn]
        corpus = self.corpus
        whole = (corpus.documents, corpus.sources, corpus.items, self.history, self.instructions, self.order)
        digest = hashlib.sha256(repr((whole, self.question)).encode()).hexdigest()[:16]
        settings = f"({self.overflow}, request {digest})"
        return "\n\n".join([self.instructions or DEFAULT_INSTRUCTIONS, settings, *pages, *turns, self.question])


# --- the request -----------------------------------------------------------------------------------------


def document_call(request: DocumentRequest, options: CallOptions) -> ModelCall:
    """Answer from whole documents; the Reply's ``extra`` has ``citations``, ``pages`` and ``warnings``."""
    return _DocumentCall(request, options)


class _DocumentCall(JoinableCall):
    """A question about documents; those about the same ones without a history can be answered together."""

    def __init__(self, request: DocumentRequest, options: CallOptions) -> None:
        self.request, self.options = request, options
        corpus = request.corpus
        same = (corpus.documents, corpus.sources, request.instructions, request.overflow, request.order, options)
        self.key = None if request.history else hashlib.sha256(repr(same).encode()).hexdigest()

    def __call__(self, engine: TideKV, emit: Emit, cancel: threading.Event) -> Reply:
        request, options = self.request, self.options
        chosen = _choose_pages(engine, request, options)
        answer = engine.ask(
            chosen.documents,
            request.question,
            history=request.history,
            instructions=request.instructions,
            chat_template_kwargs=options.chat_template_kwargs,
            on_text=lambda text: emit(Delta(text)),
            on_reasoning=lambda reasoning: emit(Delta(reasoning=reasoning)),
            cancel=cancel,
            **options.generation,
        )
        return self._reply(answer, chosen, engine)

    def together(self, engine: TideKV, places: Sequence[Waiter], tell: Tell) -> None:
        joined: list[tuple[int, _Chosen]] = []
        for number, place in enumerate(places):
            try:
                chosen = _choose_pages(engine, place.call.request, self.options)
                if chosen.documents == self.request.corpus.documents:
                    joined.append((number, chosen))
                else:  # its pages are its own
                    tell(number, place.call(engine, lambda delta: None, place.cancel))
            except TideKVError as error:
                tell(number, error)

        def on_answer(at: int, outcome: Outcome) -> None:
            number, chosen = joined[at]
            tell(number, outcome if isinstance(outcome, TideKVError) else self._reply(outcome, chosen, engine))

        if joined:
            engine.ask_many(
                self.request.corpus.documents,
                [places[number].call.request.question for number, _ in joined],
                instructions=self.request.instructions,
                chat_template_kwargs=self.options.chat_template_kwargs,
                cancel=[places[number].cancel for number, _ in joined],
                on_answer=on_answer,
                **self.options.generation,
            )

    def _reply(self, answer: Answer, chosen: _Chosen, engine: TideKV) -> Reply:
        extra = {
            "citations": [_citation(citation, self.request.corpus) for citation in answer.citations],
            "pages": chosen.report,
            "warnings": list(answer.warnings),
        }
        return Reply(answer.text, answer.finish_reason, answer.metrics, engine.name, answer.reasoning, extra)


def _citation(citation: Citation, corpus: Corpus) -> dict[str, Any]:
    return {
        **corpus.where(citation.document, citation.page, citation.label),
        "verified": citation.verified,
        "origin": citation.origin,
        "quote": citation.quote,
        "score": round(citation.score, 4),
    }


@dataclass(frozen=True)
class _Chosen:
    documents: tuple[Document, ...]
    report: dict[str, Any] = field(default_factory=dict)


def _choose_pages(engine: TideKV, request: DocumentRequest, options: CallOptions) -> _Chosen:
    """All pages if they fit, else what ``overflow`` says."""
    corpus, reserve = request.corpus, options.generation["max_new_tokens"]
    prompt = build_prompt(
        corpus.documents,
        request.question,
        engine.tokenizer,
        history=request.history,
        instructions=DEFAULT_INSTRUCTIONS if request.instructions is None else request.instructions,
        chat_template_kwargs=options.chat_template_kwargs,
    )
    window, tokens = engine.context_window, {_place(span): span.stop - span.start for span in prompt.spans}
    around = len(prompt) - sum(tokens.values())
    room = window - reserve - around
    if sum(tokens.values()) <= room:
        return _Chosen(corpus.documents, _report(corpus, prompt.spans, tokens))
    if request.overflow == "error":
        raise _overflow(corpus, prompt.spans, len(prompt), reserve, window, room)
    kept = fill_room(_ranked(request), tokens, room)
    if not kept:
        raise ContextOverflowError(
            f"not one page fits: the smallest has {min(tokens.values()):,} tokens and {max(0, room):,} of the "
            f"{window:,} are free; lower max_tokens or use a longer context window",
            prompt_tokens=around + min(tokens.values()) + reserve,
            limit=window,
        )
    return _Chosen(only_pages(corpus.documents, kept), _report(corpus, prompt.spans, kept))


def _place(span: PageSpan) -> Place:
    return span.document, span.page


def _ranked(request: DocumentRequest) -> list[Place]:
    """Pages, best first; with the caller's retriever, only those that it returned."""
    if request.order is None:
        return ranked_pages(request.corpus.documents, request.question)
    owner = {item: place for place, items in request.corpus.items.items() for item in items}
    return list(dict.fromkeys(owner[item] for item in request.order if item in owner))


def _report(corpus: Corpus, spans: Sequence[PageSpan], kept: Collection[Place]) -> dict[str, Any]:
    """Which pages went in and which did not, with their tokens; plain JSON values."""
    parts: dict[str, list[dict[str, Any]]] = {"included": [], "left_out": []}
    for span in spans:
        where = corpus.where(span.document, span.page, span.label)
        parts["included" if _place(span) in kept else "left_out"].append({**where, "tokens": span.stop - span.start})
    counts = {f"{name}_tokens": sum(page["tokens"] for page in pages) for name, pages in parts.items()}
    return {**parts, **counts}


def _overflow(
    corpus: Corpus, spans: Sequence[PageSpan], prompt_tokens: int, reserve: int, window: int, budget: int
) -> ContextOverflowError:
    fitting = 0
    for span in spans:
        budget -= span.stop - span.start
        if budget < 0:
            break
        fitting += 1
    last = spans[fitting - 1] if fitting else None
    upto = f", up to {corpus.names[last.document]} p. {last.label}" if last else ""
    return ContextOverflowError(
        f"the documents need {prompt_tokens + reserve:,} tokens ({reserve:,} for the answer) but the model takes "
        f"{window:,}; the first {fitting} of {len(spans)} pages would fit{upto}: pass fewer, or overflow='retrieve'",
        prompt_tokens=prompt_tokens + reserve,
        limit=window,
    )
