"""One question, from its checks to its answer: the thread that does the model work."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tidekv_apps.budget import Budget
from tidekv_apps.forecast import memory_problem, predictions
from tidekv_apps.jobs import Job
from tidekv_apps.models import Models
from tidekv_apps.reader import Reader
from tidekv_apps.records import Comparison, Turn
from tidekv_apps.registry import Registry
from tidekv_apps.security import plain_error
from tidekv_apps.settings import MAX_QUESTION_CHARACTERS
from tidekv_apps.visits import Visit
from tidekv_llm.documents.pdf import format_numbers
from tidekv_llm.documents.ranking import fill_room, only_pages, ranked_pages
from tidekv_llm.errors import BusyError, Cancelled, ClosedError, ConfigError, ContextOverflowError, DocumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidekv_llm.documents import Document
    from tidekv_llm.request import Progress
    from tidekv_llm.service import ModelFacts


class Asker:
    """Runs questions and comparisons, one at a time for the whole server.

    Args:
        models: what is asked, and whose turn it is.
        registry: to keep all stores together below their limit.
    """

    def __init__(self, models: Models, registry: Registry) -> None:
        self._models, self._registry = models, registry

    def start(self, visit: Visit, question: str) -> tuple[Job, Turn]:
        """Check everything that can be checked before any model work, then start.

        Raises:
            ConfigError: no question, or one that is too long.
            DocumentError: no document to ask about.
            ContextOverflowError: the documents do not fit.
            BusyError: the user's last question is not finished, or the queue is full.
        """
        turn = self._prepare(visit, question)
        job = self._join(visit)
        visit.turns.append(turn)
        visit.notice, visit.shown_turn = "", None
        self._run(job, visit, lambda: self._answer(visit, job, turn), turn)
        return job, turn

    def compare(self, visit: Visit, turn: Turn, schedule: str) -> Job:
        """Run another schedule on the prompt of an answer, up to the first token."""
        if turn.answer is None or turn.settings is None:
            raise ConfigError("there is no answer to compare with yet")
        turn.settings.change((turn.model,), schedule=schedule)
        job = self._join(visit)
        self._run(job, visit, lambda: self._compare(job, turn, schedule), None)
        return job

    def _join(self, visit: Visit) -> Job:
        """A new job of the visit, waiting in the line."""
        job = Job()
        visit.begin(job)
        try:
            job.ticket = self._models.line.join()
        except BusyError:
            job.finished.set()
            raise
        return job

    # --- checks -----------------------------------------------------------------------------------------

    def _prepare(self, visit: Visit, question: str) -> Turn:
        question = question.strip() if isinstance(question, str) else ""
        if not question:
            raise ConfigError("the question is empty; write what you want to know")
        if len(question) > MAX_QUESTION_CHARACTERS:
            raise ConfigError(
                f"a question may have {MAX_QUESTION_CHARACTERS:,} characters; this one has {len(question):,}"
            )
        facts = self._facts(visit)
        _check_documents(visit)
        budget = visit.budget(facts, question)
        if budget is None:
            raise DocumentError("there is no document to ask about; add one first")
        documents = _documents_to_send(visit, budget, question)
        if not documents or (not budget.fits and not visit.settings.retrieval):
            raise ContextOverflowError(
                f"{budget.total:,} tokens do not fit the context window of {budget.limit:,}; choose pages, "
                "or switch on best pages",
                prompt_tokens=budget.total,
                limit=budget.limit,
            )
        problem = memory_problem(facts, min(budget.total, budget.limit), visit.settings)
        if problem:
            raise ConfigError(problem)
        last = visit.turns[-1] if visit.turns else None
        turn = Turn(
            question=question,
            documents=tuple(documents),
            entry_keys=tuple(_key_of(visit, document) for document in documents),
            sent=_sent(documents),
            model=visit.settings.model,
            settings=visit.settings,
        )
        turn.document_changed = last is not None and not visit.settings.retrieval and _hashes(last) != _hashes(turn)
        return turn

    def _facts(self, visit: Visit) -> ModelFacts:
        if not self._models.ready.wait(600):
            raise BusyError("the model is still loading; try again in a minute")
        if self._models.error is not None:
            raise self._models.error
        facts = self._models.facts(visit.settings.model)
        # Another model is loaded for its tokenizer and limits when it is first asked.
        return facts or self._load(visit.settings.model)

    def _load(self, model: str) -> ModelFacts:
        with self._models.line.hold():
            self._models.load(model)
        facts = self._models.facts(model)
        assert facts is not None
        return facts

    # --- work -------------------------------------------------------------------------------------------

    def _run(self, job: Job, visit: Visit, work: Callable[[], None], turn: Turn | None) -> None:
        def body() -> None:
            try:
                with self._models.line.hold(job.cancel, ticket=job.ticket, on_place=job.wait_behind):
                    work()
            except (Cancelled, ClosedError) as error:
                _end(turn, "stopped", "" if isinstance(error, Cancelled) else "the visit was closed")
            except Exception as error:
                message = plain_error(error)
                _end(turn, "failed", message)
                if turn is None:
                    visit.notice = message
                visit.drop_reader()
            finally:
                job.finished.set()

        threading.Thread(target=body, name="tidekv-ask", daemon=True).start()

    def _answer(self, visit: Visit, job: Job, turn: Turn) -> None:
        settings = turn.settings
        assert settings is not None
        job.show("Preparing", f"{turn.model}, {turn.sent}")
        reader = self._reader(visit, turn)
        history = visit.history()
        answer = reader.ask(
            turn.question,
            history,
            **settings.sampling(),
            on_text=job.add_text,
            progress=lambda step: _show_prefill(job, step),
            cancel=job.cancel,
        )
        turn.answer, turn.text, turn.state = answer, answer.text, "done"
        facts = self._models.facts(turn.model)
        if facts is not None:
            turn.predictions = predictions(facts, answer.prompt_tokens, settings, answer.metrics.chunk_size)
        if visit.closed:
            visit.drop_reader()
        self._registry.trim_stores(keep=visit)

    def _reader(self, visit: Visit, turn: Turn) -> Reader:
        """The visit's reader if documents and settings are the same, else a new one."""
        settings = turn.settings
        assert settings is not None
        key = (*_hashes(turn), settings.model, settings.context_window, settings.prefill())
        with visit.lock:
            if visit.reader is not None and visit.reader.key == key:
                return visit.reader
        visit.drop_reader()
        reader = Reader(self._models.engine(settings), turn.documents, key)
        with visit.lock:
            visit.reader = reader
        return reader

    def _compare(self, job: Job, turn: Turn, schedule: str) -> None:
        assert turn.settings is not None and turn.answer is not None
        job.show("Comparing", schedule)
        settings = turn.settings.change((turn.model,), schedule=schedule)
        with self._models.engine(settings) as engine:
            run = engine.generate(
                list(turn.answer.prompt.token_ids),
                max_new_tokens=1,
                progress=lambda step: _show_prefill(job, step, f"Running {schedule}"),
                cancel=job.cancel,
            )
        metrics = run.metrics
        turn.comparisons = [done for done in turn.comparisons if done.schedule != schedule]
        turn.comparisons.append(
            Comparison(
                schedule,
                dict(metrics.components),
                metrics.construction_peak_bytes,
                metrics.transient_bytes,
                metrics.ttft_seconds,
            )
        )


def _show_prefill(job: Job, step: Progress, stage: str = "Reading the prompt") -> None:
    detail = f"layer {step.layer} of {step.layers}, chunk {step.chunk} of {step.chunks}"
    eta = f", about {step.eta_seconds:.0f} s left" if step.fraction > 0.02 else ""
    job.show(stage, detail + eta, step.fraction)


def _end(turn: Turn | None, state: str, error: str) -> None:
    if turn is not None:
        turn.state, turn.error = state, error  # type: ignore[assignment]


def _check_documents(visit: Visit) -> None:
    waiting = [entry.name for entry in visit.entries if entry.state in ("reading", "locked")]
    if waiting:
        state = "is still being read" if any(e.state == "reading" for e in visit.entries) else "needs its password"
        raise DocumentError(f"{waiting[0]} {state}; wait, unlock it or remove it")
    if not visit.ready_documents():
        raise DocumentError("there is no document to ask about; add one first")


def _documents_to_send(visit: Visit, budget: Budget, question: str) -> list[Document]:
    """All ready documents, or their best pages where retrieval is on and needed."""
    documents = visit.ready_documents()
    if budget.fits or not visit.settings.retrieval:
        return documents
    # The question is counted already; a page marker may take a token more once fewer files are named.
    pages = sum(budget.page_tokens.values())
    room = pages - (budget.total - budget.limit) - 16
    kept = fill_room(ranked_pages(documents, question), budget.page_tokens, room)
    return [document for document in only_pages(documents, kept) if document.pages]


def _key_of(visit: Visit, document: Document) -> str:
    """The file that a selection of pages came from: selecting keeps the very page objects."""
    first = document.pages[0]
    for entry in visit.entries:
        if entry.document is not None and any(page is first for page in entry.document.pages):
            return entry.key
    return ""


def _hashes(turn: Turn) -> tuple[str, ...]:
    return tuple(f"{document.name}\0{document.content_hash}" for document in turn.documents)


def _sent(documents: Sequence[Document]) -> str:
    """What goes into the prompt: ``contract.pdf pages 1-8; annex.pdf pages 2, 5``."""
    return "; ".join(
        f"{document.name} pages {format_numbers([page.number for page in document.pages if page.readable])}"
        for document in documents
    )
