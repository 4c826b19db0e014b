"""What happens on every click: between Gradio's events and the app's own parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from tidekv_apps import export, ingest, panels, viewer
from tidekv_apps.ask import Asker
from tidekv_apps.budget import Budget, memory_problem
from tidekv_apps.models import Models
from tidekv_apps.security import OWNER_COOKIE, plain_error
from tidekv_apps.settings import AppOptions, AskSettings
from tidekv_apps.state import Job, Registry, Session, SessionClosedError
from tidekv_llm.errors import BusyError, ConfigError

POLL_SECONDS = 0.1
SAMPLE = Path(__file__).parent / "samples" / "lighthouse.pdf"


class Services:
    """One of each: models, queue, sessions.

    Args:
        options: how the app was started.
        folder: the private folder for uploads and sessions.
    """

    def __init__(self, options: AppOptions, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.uploads = folder / "uploads"
        self.reading = threading.BoundedSemaphore(2)
        self.registry = Registry(folder / "sessions", options.limits, self._new_settings)
        self.models = Models(options, before_unload=self.registry.drop_readers)
        self.asker = Asker(self.models, self.registry)
        self._stopped = threading.Event()

    def _new_settings(self) -> AskSettings:
        return AskSettings(model=self.options.models[0])

    def start(self) -> None:
        """Load the first model and begin to look for idle sessions."""
        self.models.start()
        threading.Thread(target=self._sweep, name="tidekv-sweep", daemon=True).start()

    def stop(self) -> None:
        """Free everything."""
        self._stopped.set()
        self.registry.close_all()
        self.models.close()

    def _sweep(self) -> None:
        while not self._stopped.wait(min(30.0, self.options.limits.idle_seconds)):
            self.registry.sweep()

    def session(self, request: Any) -> Session:
        """The caller's session; nobody else's cookie opens it."""
        key, owner = identity(request)
        return self.registry.get(key, owner)


def identity(request: Any) -> tuple[str, str]:
    """Session key and owner of a Gradio request."""
    session_hash = getattr(request, "session_hash", None)
    if not session_hash:
        raise SessionClosedError("this request has no session; reload the page")
    user = getattr(request, "username", None) or ""
    inner = getattr(request, "request", None)
    cookie = inner.cookies.get(OWNER_COOKIE, "") if inner is not None else ""
    return f"{user}\0{session_hash}", f"{user}\0{cookie}"


# --- what the page shows --------------------------------------------------------------------------------


def budget_of(services: Services, session: Session, question: str = "") -> Budget | None:
    """The next question's budget; None while the model is not there or nothing can be asked about."""
    facts = services.models.facts(session.settings.model)
    if facts is None or any(entry.state in ("reading", "locked") for entry in session.entries):
        return None
    return session.counter.count(session, facts, question if isinstance(question, str) else "")


def problem_of(services: Services, session: Session, budget: Budget | None) -> str:
    """Why the settings cannot run, if they cannot."""
    if session.settings_error:
        return session.settings_error
    facts = services.models.facts(session.settings.model)
    if budget is None or facts is None:
        return ""
    return memory_problem(facts, min(budget.total, budget.limit), session.settings)


def can_ask(session: Session, budget: Budget | None, problem: str) -> bool:
    """Whether the Ask button works."""
    running = session.job is not None and not session.job.finished.is_set() and not session.job.cancel.is_set()
    return budget is not None and not problem and not running and (budget.fits or session.settings.retrieval)


def status_line(services: Services) -> str:
    """What the models are doing."""
    models = services.models
    if models.error is not None:
        return panels.notice(plain_error(models.error), "error")
    if not models.ready.is_set():
        return panels.notice(f"{models.message} {100 * models.fraction:.0f}%")
    return ""


# --- documents ------------------------------------------------------------------------------------------


async def work(job: Job, body: Callable[[], None], errors: list[str]) -> AsyncIterator[None]:
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
    async for _ in changes(job):
        yield


async def changes(job: Job) -> AsyncIterator[None]:
    """Once at the beginning, at every change, and once at the end; cancels the job if nobody listens any more."""
    seen = -1
    try:
        while not job.finished.is_set():
            if job.version != seen:
                seen = job.version
                yield
            await asyncio.sleep(POLL_SECONDS)
        yield
    finally:
        if not job.finished.is_set():
            job.cancel.set()


def begin_reading(session: Session) -> Job:
    """A job for reading files; one at a time per session."""
    with session.lock:
        if session.reading is not None and not session.reading.finished.is_set():
            raise BusyError("files of yours are being read; wait for them or stop them")
        session.reading = Job()
        return session.reading


async def read_files(services: Services, session: Session, paths: Sequence[str]) -> AsyncIterator[None]:
    """Admit and read uploaded files, with a yield per change."""
    session.notice = ""
    job = begin_reading(session)
    task = ingest.Ingest(session, services.uploads, services.options.limits)

    def body() -> None:
        entries = task.admit(paths)
        with services.reading:
            task.read(entries, job)
        count_now(services, session)

    errors: list[str] = []
    async for _ in work(job, body, errors):
        yield
    session.notice = errors[0] if errors else session.notice


def count_now(services: Services, session: Session) -> None:
    """Count tokens here, in the reading thread, so that the page does not wait for it later."""
    services.models.ready.wait(600)
    budget_of(services, session)


async def read_sample(services: Services, session: Session) -> AsyncIterator[None]:
    """Read the example that comes with the app."""
    if any(entry.name == SAMPLE.name and entry.state == "ready" for entry in session.entries):
        return
    copy = services.uploads / session.folder.name / SAMPLE.name
    copy.parent.mkdir(mode=0o700, exist_ok=True)
    copy.write_bytes(SAMPLE.read_bytes())
    async for _ in read_files(services, session, [str(copy)]):
        yield


async def unlock(services: Services, session: Session, key: str, password: str) -> AsyncIterator[None]:
    """Try the password of an encrypted file."""
    job = begin_reading(session)
    task = ingest.Ingest(session, services.uploads, services.options.limits)
    errors: list[str] = []
    async for _ in work(job, lambda: task.unlock(key, password, job), errors):
        yield
    session.notice = errors[0] if errors else ""


def act(services: Services, session: Session, name: str, argument: str, value: str) -> None:
    """A click inside one of the panels.

    Raises:
        ConfigError: no such action.
        TideKVError: the action cannot be done.
    """
    session.notice = ""
    actions: dict[str, Callable[[], object]] = {
        "remove": lambda: ingest.remove(session, argument),
        "up": lambda: ingest.move(session, argument, -1),
        "down": lambda: ingest.move(session, argument, 1),
        "pages": lambda: ingest.set_pages(session, argument, value),
        "restore": lambda: ingest.restore(session),
        "stop-reading": session.stop,
        "cite": lambda: viewer.open_citation(session, argument),
        "strip": lambda: viewer.open_strip(session, argument),
        "text": lambda: _open_text(services, session, argument, 0),
        "text-at": lambda: _open_text(services, session, *_key_and_start(argument)),
        "close-viewer": lambda: setattr(session, "viewer", None),
        "figures": lambda: setattr(session, "shown_turn", argument),
        "layers": lambda: setattr(session, "by_layer", not session.by_layer),
    }
    if name not in actions:
        raise ConfigError("that button does nothing here")
    actions[name]()


def _key_and_start(argument: str) -> tuple[str, int]:
    key, _, start = argument.partition(":")
    return key, int(start[:9]) if start.isdecimal() else 0


def _open_text(services: Services, session: Session, key: str, start: int) -> None:
    budget = budget_of(services, session)
    ready = [entry for entry in session.entries if entry.document is not None]
    at = next((at for at, entry in enumerate(ready) if entry.key == key), -1)
    tokens = {page: n for (document, page), n in budget.page_tokens.items() if document == at} if budget else {}
    viewer.open_text(session, key, tokens, start)


# --- settings and export --------------------------------------------------------------------------------


def change_settings(services: Services, session: Session, changes: dict[str, Any]) -> None:
    """Apply settings to the next question; impossible ones are refused and named."""
    try:
        session.settings = session.settings.change(services.options.models, **changes)
        session.settings_error = ""
    except ConfigError as error:
        session.settings_error = str(error)
        raise


def exported(session: Session, kind: str) -> str:
    """The conversation as ``markdown`` or ``json``."""
    if kind not in ("markdown", "json"):
        raise ConfigError("the export is 'markdown' or 'json'")
    return export.as_json(session) if kind == "json" else export.as_markdown(session)
