"""Who is here and what they hold.

Gradio deep-copies its own state, so documents, answers and stored prefixes live here, keyed by Gradio's visit.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tidekv_apps.budget import Budget, BudgetCounter
from tidekv_apps.jobs import BusyError, Job
from tidekv_apps.records import Entry, Turn
from tidekv_apps.settings import AskSettings, Limits
from tidekv_apps.storage import Holder, Storage
from tidekv_llm.errors import DocumentError, TideKVError
from tidekv_llm.memory.probes import return_free_heap

if TYPE_CHECKING:
    from tidekv_apps.engines import ModelFacts
    from tidekv_apps.reader import Reader
    from tidekv_llm.documents import Document


class VisitClosedError(TideKVError):
    """The visit is gone, or is not the caller's."""


class Visit:
    """One browser tab: its documents, conversation, settings and store, and nobody else's."""

    def __init__(self, owner: str, folder: Path, settings: AskSettings, storage: Storage) -> None:
        self.owner, self.folder, self.settings, self.storage = owner, folder, settings, storage
        self.holder = Holder(owner, folder.name)
        self.lock, self.turnstile = threading.RLock(), asyncio.Lock()
        self.entries: list[Entry] = []
        self.parked: list[Entry] = []
        self.turns: list[Turn] = []
        self.notice = ""
        self.settings_error = ""
        self.job: Job | None = None
        self.reading: Job | None = None
        self.reader: Reader | None = None
        self.viewer: str | None = None
        self.shown_turn: str | None = None
        self.by_layer = False
        self.counter = BudgetCounter()
        self.last_used = time.monotonic()
        self.closed = False

    @property
    def busy(self) -> bool:
        """Whether a job of this visit runs or waits."""
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

    def history(self) -> list[tuple[str, str]]:
        """Earlier questions and answers about the documents as they are now."""
        turns: list[tuple[str, str]] = []
        for turn in self.turns:
            if turn.document_changed:
                turns.clear()
            if turn.state == "done" and turn.answer is not None:
                turns.append((turn.question, turn.text))
        return turns

    def ready_documents(self) -> list[Document]:
        """The selected pages of every file that was read."""
        return [document for entry in self.entries if (document := entry.selected()) is not None]

    def budget(self, facts: ModelFacts, question: str) -> Budget | None:
        """What the next question would take; None without a document that is ready."""
        return self.counter.count(self.ready_documents(), self.history(), self.settings, facts, question)

    def begin(self, job: Job) -> None:
        """Make ``job`` the visit's running one.

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
        """Forget documents and conversation, and delete the files."""
        self.stop()
        with self.lock:
            self.entries, self.parked, self.turns = [], [], []
            self.viewer = self.shown_turn = None
            self.notice = ""
            self.counter.forget()
        self.drop_reader()
        self.tidy()

    def tidy(self) -> None:
        """Delete the files of entries that are gone, count neither them nor their text, and return the memory."""
        with self.lock:
            here = [*self.entries, *self.parked]
            digests = {entry.digest for entry in here}
            for file in self.folder.iterdir() if self.folder.exists() else ():
                if file.name not in digests:
                    file.unlink(missing_ok=True)
            self.storage.files.keep_only(self.holder, digests)
            self.storage.texts.keep_only(self.holder, {entry.key for entry in here})
        return_free_heap()

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
    """All visits, by Gradio's session id and the browser's own secret."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        new_settings: Callable[[], AskSettings],
        storage: Storage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._limits, self._new_settings, self._clock = folder, limits, new_settings, clock
        self._storage = storage
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._visits)

    def get(self, key: str, owner: str) -> Visit:
        """The visit of that id, made when it is new.

        Raises:
            VisitClosedError: it belongs to another browser or user.
            BusyError: there are too many visits, all in use.
        """
        with self._lock:
            visit = self._visits.get(key)
            if visit is None:
                visit = self._make(key, owner)
            elif not hmac.compare_digest(visit.owner.encode(), owner.encode()):
                raise VisitClosedError("this visit belongs to another browser; reload the page")
            visit.last_used = self._clock()
            self._visits.move_to_end(key)
            return visit

    def _make(self, key: str, owner: str) -> Visit:
        if len(self._visits) >= self._limits.visits:
            idle = next((k for k, s in self._visits.items() if not s.busy), None)
            if idle is None:
                raise BusyError("too many people are using this app; try again in a minute")
            self._visits.pop(idle).close()
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir(mode=0o700)
        visit = Visit(owner, folder, self._new_settings(), self._storage)
        visit.last_used = self._clock()
        self._visits[key] = visit
        return visit

    def close(self, key: str, owner: str) -> None:
        """Free the visit of a tab that was closed; nothing if it is another browser's."""
        with self._lock:
            visit = self._visits.get(key)
            if visit is None or not hmac.compare_digest(visit.owner.encode(), owner.encode()):
                return
            del self._visits[key]
        visit.close()

    def sweep(self) -> int:
        """Close idle visits and free stores beyond the limit; returns how many visits were closed."""
        now = self._clock()
        with self._lock:
            old = [
                key
                for key, visit in self._visits.items()
                if now - visit.last_used > self._limits.idle_seconds and not visit.busy
            ]
            closing = [self._visits.pop(key) for key in old]
        for visit in closing:
            visit.close()
        self.trim_stores()
        return len(closing)

    def trim_stores(self, keep: Visit | None = None) -> None:
        """Free the least recently used stores until all together fit the limit."""
        with self._lock:
            visits = list(self._visits.values())
        total = sum(visit.reader.store_bytes for visit in visits if visit.reader is not None)
        for visit in visits:
            if total <= self._limits.store_bytes:
                return
            if visit.reader is not None and visit is not keep:
                total -= visit.reader.store_bytes
                visit.drop_reader()

    def drop_readers(self) -> None:
        """Free every store: their model is about to be unloaded."""
        with self._lock:
            visits = list(self._visits.values())
        for visit in visits:
            visit.drop_reader()

    def close_all(self) -> None:
        """End of the program."""
        with self._lock:
            visits, self._visits = list(self._visits.values()), OrderedDict()
        for visit in visits:
            visit.close()
