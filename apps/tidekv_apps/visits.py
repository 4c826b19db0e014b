"""Who is here and what they hold.

Gradio deep-copies its own state, so documents, answers and stored prefixes live here, keyed by Gradio's visit.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from tidekv_apps.budget import Budget, BudgetCounter, Source
from tidekv_apps.jobs import Job
from tidekv_apps.records import Entry, Turn
from tidekv_apps.settings import AskSettings
from tidekv_apps.storage import Holder, Storage
from tidekv_llm.errors import BusyError, DocumentError, TideKVError
from tidekv_llm.memory.probes import return_free_heap

if TYPE_CHECKING:
    from tidekv_apps.reader import Reader
    from tidekv_llm.documents import Document
    from tidekv_llm.service import ModelFacts


# Below, what malloc keeps of a text is worth less than the milliseconds that it takes to return it.
LARGE_BYTES = 1 << 20


class VisitClosedError(TideKVError):
    """The visit is gone, or is not the caller's."""


class Visit:
    """One browser tab: its documents, conversation, settings and store, and nobody else's."""

    def __init__(self, owner: str, folder: Path, settings: AskSettings, storage: Storage, address: str = "") -> None:
        self.owner, self.folder, self.settings, self.address = owner, folder, settings, address
        self.storage, self.holder = storage, Holder(owner, folder.name)
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
        self.events: deque[str] = deque(maxlen=500)  # Gradio's ids of what this visit asked for

    @property
    def busy(self) -> bool:
        """Whether a job of this visit runs or waits."""
        return any(job is not None and not job.finished.is_set() for job in (self.job, self.reading))

    @property
    def empty(self) -> bool:
        """Whether nothing is lost when it is closed."""
        return not (self.entries or self.parked or self.turns or self.busy)

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
        return self.counter.count(self._sources(), self.history(), self.settings, facts, question)

    def is_counted(self, facts: ModelFacts) -> bool:
        """Whether :meth:`budget` answers at once."""
        return self.counter.is_counted(self._sources(), facts)

    def _sources(self) -> list[Source]:
        pairs = ((entry.document, entry.selected()) for entry in self.entries)
        return [Source(whole, chosen) for whole, chosen in pairs if whole is not None and chosen is not None]

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
            freed = self.storage.texts.keep_only(self.holder, {entry.key for entry in here})
        if freed > LARGE_BYTES:
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
