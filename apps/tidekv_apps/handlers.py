"""What happens on every click: between Gradio's events and the app's own parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tidekv_apps import export, ingest, panels, viewer
from tidekv_apps.budget import Budget
from tidekv_apps.forecast import memory_problem
from tidekv_apps.jobs import Job
from tidekv_apps.security import plain_error
from tidekv_apps.services import Services
from tidekv_apps.settings import MAX_QUESTION_CHARACTERS
from tidekv_apps.visits import Visit
from tidekv_llm.errors import BusyError, ConfigError
from tidekv_llm.memory.probes import return_free_heap

POLL_SECONDS = 0.1
SAMPLE = Path(__file__).parent / "samples" / "lighthouse.pdf"


# --- what the page shows --------------------------------------------------------------------------------


def budget_of(
    services: Services, visit: Visit, question: str = "", cancel: threading.Event | None = None
) -> Budget | None:
    """The next question's budget; None while the model is not there or nothing can be asked about."""
    facts = services.models.facts(visit.settings.model)
    if facts is None or any(entry.state in ("reading", "locked") for entry in visit.entries):
        return None
    text = question[:MAX_QUESTION_CHARACTERS] if isinstance(question, str) else ""
    if visit.is_counted(facts):
        return visit.budget(facts, text)
    budget = services.lanes.count(visit.owner, cancel or threading.Event(), lambda: visit.budget(facts, text))
    return_free_heap()
    return budget


def problem_of(services: Services, visit: Visit, budget: Budget | None) -> str:
    """Why the settings cannot run, if they cannot."""
    if visit.settings_error:
        return visit.settings_error
    facts = services.models.facts(visit.settings.model)
    if budget is None or facts is None:
        return ""
    return memory_problem(facts, min(budget.total, budget.limit), visit.settings)


def can_ask(visit: Visit, budget: Budget | None, problem: str) -> bool:
    """Whether the Ask button works."""
    running = visit.job is not None and not visit.job.finished.is_set() and not visit.job.cancel.is_set()
    return budget is not None and not problem and not running and (budget.fits or visit.settings.retrieval)


def status_line(services: Services) -> str:
    """What the models are doing."""
    models = services.models
    if models.error is not None:
        return panels.notice(plain_error(models.error), "error")
    if not models.ready.is_set():
        return panels.notice(f"{models.message} {100 * models.fraction:.0f}%")
    return ""


# --- documents ------------------------------------------------------------------------------------------


def never_gone() -> bool:
    """Of a page: its end breaks off its events, so that nobody has to ask."""
    return False


async def work(
    job: Job, body: Callable[[], None], errors: list[str], gone: Callable[[], bool] = never_gone
) -> AsyncIterator[None]:
    """Run ``body`` in a thread and come back at every change of ``job``."""

    def guarded() -> None:
        try:
            body()
        except Exception as error:
            errors.append(plain_error(error))
        finally:
            job.finished.set()

    thread = threading.Thread(target=guarded, name="tidekv-read", daemon=True)
    thread.start()
    async for _ in changes(job, gone):
        yield


async def changes(job: Job, gone: Callable[[], bool] = never_gone) -> AsyncIterator[None]:
    """Once at the beginning, at every change, and once at the end; cancels the job if nobody listens any more."""
    seen = -1
    try:
        while not job.finished.is_set():
            if gone():
                job.cancel.set()
            if job.version != seen:
                seen = job.version
                yield
            await asyncio.sleep(POLL_SECONDS)
        yield
    finally:
        if not job.finished.is_set():
            job.cancel.set()


def begin_reading(visit: Visit) -> Job:
    """A job for reading files; one at a time per visit."""
    with visit.lock:
        if visit.reading is not None and not visit.reading.finished.is_set():
            raise BusyError("files of yours are being read; wait for them or stop them")
        visit.reading = Job()
        return visit.reading


async def read_files(
    services: Services, visit: Visit, paths: Sequence[str], gone: Callable[[], bool] = never_gone
) -> AsyncIterator[None]:
    """Admit and read uploaded files, with a yield per change."""
    visit.notice = ""
    job = await services.beside(visit, begin_reading, visit)
    task = ingest.Ingest(visit, services.uploads, services.options.limits, services.lanes)

    def body() -> None:
        task.read(task.admit(paths, job), job)
        count_now(services, visit, job)

    errors: list[str] = []
    async for _ in work(job, body, errors, gone):
        yield
    visit.notice = errors[0] if errors else visit.notice


def count_now(services: Services, visit: Visit, job: Job) -> None:
    """Count tokens here, in the reading thread, so that the page does not wait for it later."""
    services.models.ready.wait(600)
    budget_of(services, visit, cancel=job.cancel)


async def read_sample(services: Services, visit: Visit) -> AsyncIterator[None]:
    """Read the example that comes with the app."""
    if any(entry.name == SAMPLE.name and entry.state == "ready" for entry in visit.entries):
        return
    copy = services.uploads / visit.folder.name / SAMPLE.name
    copy.parent.mkdir(mode=0o700, exist_ok=True)
    copy.write_bytes(SAMPLE.read_bytes())
    async for _ in read_files(services, visit, [str(copy)]):
        yield


async def unlock(services: Services, visit: Visit, key: str, password: str) -> AsyncIterator[None]:
    """Try the password of an encrypted file."""
    job = await services.beside(visit, begin_reading, visit)
    task = ingest.Ingest(visit, services.uploads, services.options.limits, services.lanes)
    errors: list[str] = []
    async for _ in work(job, lambda: task.unlock(key, password, job), errors):
        yield
    visit.notice = errors[0] if errors else ""


def act(services: Services, visit: Visit, name: str, argument: str, value: str) -> None:
    """A click inside one of the panels.

    Raises:
        ConfigError: no such action.
        TideKVError: the action cannot be done.
    """
    visit.notice = ""
    actions: dict[str, Callable[[], object]] = {
        "remove": lambda: ingest.remove(visit, argument),
        "up": lambda: ingest.move(visit, argument, -1),
        "down": lambda: ingest.move(visit, argument, 1),
        "pages": lambda: ingest.set_pages(visit, argument, value),
        "restore": lambda: ingest.restore(visit),
        "stop-reading": visit.stop,
        "cite": lambda: viewer.open_citation(visit, argument),
        "strip": lambda: viewer.open_strip(visit, argument),
        "text": lambda: _open_text(services, visit, argument, 0),
        "text-at": lambda: _open_text(services, visit, *_key_and_start(argument)),
        "close-viewer": lambda: setattr(visit, "viewer", None),
        "figures": lambda: setattr(visit, "shown_turn", argument),
        "layers": lambda: setattr(visit, "by_layer", not visit.by_layer),
    }
    if name not in actions:
        raise ConfigError("that button does nothing here")
    actions[name]()


def _key_and_start(argument: str) -> tuple[str, int]:
    key, _, start = argument.partition(":")
    return key, int(start[:9]) if start.isdecimal() else 0


def _open_text(services: Services, visit: Visit, key: str, start: int) -> None:
    budget = budget_of(services, visit)
    ready = [entry for entry in visit.entries if entry.document is not None]
    at = next((at for at, entry in enumerate(ready) if entry.key == key), -1)
    tokens = {page: n for (document, page), n in budget.page_tokens.items() if document == at} if budget else {}
    viewer.open_text(visit, key, tokens, start)


# --- settings and export --------------------------------------------------------------------------------


def change_settings(services: Services, visit: Visit, changes: dict[str, Any]) -> None:
    """Apply settings to the next question; impossible ones are refused and named."""
    try:
        visit.settings = visit.settings.change(services.options.models, **changes)
        visit.settings_error = ""
    except ConfigError as error:
        visit.settings_error = str(error)
        raise


def exported(visit: Visit, kind: str) -> str:
    """The conversation as ``markdown`` or ``json``."""
    if kind not in ("markdown", "json"):
        raise ConfigError("the export is 'markdown' or 'json'")
    return export.as_json(visit) if kind == "json" else export.as_markdown(visit)
