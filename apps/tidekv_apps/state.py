"""Who is here, what they hold, and whose turn it is.

Gradio deep-copies its own state, so documents, answers and caches live here, keyed by session. One model job runs
at a time; the others wait in order of arrival and know their place.
"""

from __future__ import annotations

import hmac
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tidekv_apps.budget import BudgetCounter
from tidekv_apps.settings import AskSettings, Limits
from tidekv_llm.errors import BusyError, DocumentError, TideKVError
from tidekv_llm.lock import Ticket

if TYPE_CHECKING:
    from tidekv_apps.reader import Reader
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer


class SessionClosedError(TideKVError):
    """The session is gone, or is not the caller's."""


EntryState = Literal["reading", "ready", "locked", "failed"]


@dataclass
class Entry:
    """One file of a session.

    Attributes:
        key: names it in the page.
        name: as uploaded, made safe to show.
        path: the session's own copy.
        digest: SHA-256 of the bytes.
        state: being read, ready, waiting for its password, or failed.
        document: all its pages.
        pages: selection such as "1-3,7"; empty for all.
        error: why it failed, or what the password prompt says.
        done: pages read so far.
        total: pages in all.
        password: kept for page previews.
    """

    name: str
    path: Path
    digest: str
    key: str = field(default_factory=lambda: secrets.token_hex(4))
    state: EntryState = "reading"
    document: Document | None = None
    pages: str = ""
    error: str = ""
    done: int = 0
    total: int = 0
    password: str | None = None

    def selected(self) -> Document | None:
        """The pages that go into the prompt."""
        if self.document is None:
            return None
        return self.document.select(self.pages) if self.pages else self.document


@dataclass
class Comparison:
    """A real run of another schedule on the same prompt."""

    schedule: str
    components: dict[str, int]
    construction_peak_bytes: int
    transient_bytes: int
    ttft_seconds: float


@dataclass
class Turn:
    """One question and what came of it."""

    question: str
    documents: tuple[Document, ...]
    entry_keys: tuple[str, ...]
    sent: str
    model: str
    key: str = field(default_factory=lambda: secrets.token_hex(4))
    text: str = ""
    state: Literal["running", "done", "stopped", "failed"] = "running"
    error: str = ""
    answer: Answer | None = None
    settings: AskSettings | None = None
    predictions: dict[str, dict[str, int]] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    document_changed: bool = False


@dataclass
class Live:
    """What the running job says about itself."""

    stage: str = ""
    detail: str = ""
    fraction: float | None = None
    text: str = ""


class Job:
    """One piece of model work: a cancel flag, and what the page shows meanwhile."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.finished = threading.Event()
        self.live = Live()
        self.version = 0
        self.ticket: Ticket | None = None

    def show(self, stage: str, detail: str = "", fraction: float | None = None) -> None:
        """Say what is going on."""
        self.live = Live(stage, detail, fraction, self.live.text)
        self.version += 1

    def add_text(self, delta: str) -> None:
        """Add a piece of the answer."""
        self.live = Live("Answering", "", None, self.live.text + delta)
        self.version += 1

    def wait_behind(self, place: int) -> None:
        """Say how many questions come first."""
        self.show("Waiting", f"{place} before you in the queue")


class Session:
    """One browser tab: its documents, conversation, settings and store, and nobody else's."""

    def __init__(self, owner: str, folder: Path, settings: AskSettings) -> None:
        self.owner, self.folder, self.settings = owner, folder, settings
        self.lock = threading.RLock()
        self.entries: list[Entry] = []
        self.parked: list[Entry] = []
        self.turns: list[Turn] = []
        self.notice = ""
        self.settings_error = ""
        self.job: Job | None = None
        self.reading: Job | None = None
        self.reader: Reader | None = None
        self.viewer: dict[str, Any] | None = None
        self.shown_turn: str | None = None
        self.by_layer = False
        self.counter = BudgetCounter()
        self.last_used = time.monotonic()
        self.closed = False

    @property
    def busy(self) -> bool:
        """Whether a job of this session runs or waits."""
        return any(job is not None and not job.finished.is_set() for job in (self.job, self.reading))

    def entry(self, key: str) -> Entry:
        """The file of that key.

        Raises:
            DocumentError: there is none.
        """
        for entry in self.entries:
            if entry.key == key:
                return entry
        raise DocumentError("that document is no longer here")

    def turn(self, key: str | None) -> Turn | None:
        """The question of that key, or the last one that was answered."""
        done = [turn for turn in self.turns if turn.answer is not None]
        for turn in done:
            if turn.key == key:
                return turn
        return done[-1] if done else None

    def begin(self, job: Job) -> None:
        """Make ``job`` the session's running one.

        Raises:
            BusyError: another one is running and was not stopped.
        """
        with self.lock:
            current = self.job
            if current is not None and not current.finished.is_set() and not current.cancel.is_set():
                raise BusyError("a question of yours is being answered; wait for it or stop it")
            self.job = job

    def drop_reader(self) -> None:
        """Free the stored prefix."""
        with self.lock:
            reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()

    def clear(self) -> None:
        """Forget documents and conversation."""
        self.stop()
        with self.lock:
            self.entries, self.parked, self.turns = [], [], []
            self.viewer = self.shown_turn = None
            self.notice = ""
        self.drop_reader()

    def stop(self) -> None:
        """Ask what runs to stop."""
        for job in (self.job, self.reading):
            if job is not None:
                job.cancel.set()

    def close(self) -> None:
        """Stop, forget and delete everything."""
        self.closed = True
        self.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


class Registry:
    """All sessions, by Gradio's session id and the browser's own secret."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        new_settings: Callable[[], AskSettings],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._limits, self._new_settings, self._clock = folder, limits, new_settings, clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: str, owner: str) -> Session:
        """The session of that id, made when it is new.

        Raises:
            SessionClosedError: it belongs to another browser or user.
            BusyError: there are too many sessions, all in use.
        """
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                session = self._make(key, owner)
            elif not hmac.compare_digest(session.owner.encode(), owner.encode()):
                raise SessionClosedError("this session belongs to another browser; reload the page")
            session.last_used = self._clock()
            self._sessions.move_to_end(key)
            return session

    def _make(self, key: str, owner: str) -> Session:
        if len(self._sessions) >= self._limits.sessions:
            idle = next((k for k, s in self._sessions.items() if not s.busy), None)
            if idle is None:
                raise BusyError("too many people are using this app; try again in a minute")
            self._sessions.pop(idle).close()
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir(mode=0o700)
        session = Session(owner, folder, self._new_settings())
        session.last_used = self._clock()
        self._sessions[key] = session
        return session

    def close(self, key: str, owner: str) -> None:
        """Free the session of a tab that was closed; nothing if it is another browser's."""
        with self._lock:
            session = self._sessions.get(key)
            if session is None or not hmac.compare_digest(session.owner.encode(), owner.encode()):
                return
            del self._sessions[key]
        session.close()

    def sweep(self) -> int:
        """Close idle sessions and free stores beyond the limit; returns how many sessions were closed."""
        now = self._clock()
        with self._lock:
            old = [
                key
                for key, session in self._sessions.items()
                if now - session.last_used > self._limits.idle_seconds and not session.busy
            ]
            closing = [self._sessions.pop(key) for key in old]
        for session in closing:
            session.close()
        self.trim_stores()
        return len(closing)

    def trim_stores(self, keep: Session | None = None) -> None:
        """Free the least recently used stores until all together fit the limit."""
        with self._lock:
            sessions = list(self._sessions.values())
        total = sum(session.reader.store_bytes for session in sessions if session.reader is not None)
        for session in sessions:
            if total <= self._limits.store_bytes:
                return
            if session.reader is not None and session is not keep:
                total -= session.reader.store_bytes
                session.drop_reader()

    def drop_readers(self) -> None:
        """Free every store: their model is about to be unloaded."""
        with self._lock:
            sessions = list(self._sessions.values())
        for session in sessions:
            session.drop_reader()

    def close_all(self) -> None:
        """End of the program."""
        with self._lock:
            sessions, self._sessions = list(self._sessions.values()), OrderedDict()
        for session in sessions:
            session.close()
