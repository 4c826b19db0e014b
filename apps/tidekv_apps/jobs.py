"""Pieces of work: one model job at a time, the others wait in order of arrival and know their place."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tidekv_llm.errors import Cancelled, TideKVError


class BusyError(TideKVError):
    """Too much is going on; the message says what to wait for."""


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

    def show(self, stage: str, detail: str = "", fraction: float | None = None) -> None:
        """Say what is going on."""
        self.live = Live(stage, detail, fraction, self.live.text)
        self.version += 1

    def add_text(self, delta: str) -> None:
        """Add a piece of the answer."""
        self.live = Live("Answering", "", None, self.live.text + delta)
        self.version += 1


class JobQueue:
    """A first-come lock of one, with a limit on how many may wait."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._line: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running = False

    def __len__(self) -> int:
        return len(self._line)

    def join(self, job: Job) -> None:
        """Take a place at the end.

        Raises:
            BusyError: the line is full.
        """
        with self._changed:
            if len(self._line) > self._max_waiting:
                raise BusyError(f"{len(self._line)} questions are waiting already; try again in a minute")
            self._line.append(job)

    @contextmanager
    def turn(self, job: Job) -> Iterator[None]:
        """Wait for the job's turn, telling it its place; leave the line in any case.

        Raises:
            Cancelled: the job was cancelled while it waited.
        """
        try:
            self._wait(job)
            yield
        finally:
            with self._changed:
                if self._line and self._line[0] is job:
                    self._running = False
                with contextlib.suppress(ValueError):
                    self._line.remove(job)
                self._changed.notify_all()

    def _wait(self, job: Job) -> None:
        shown = -1
        with self._changed:
            while True:
                if job.cancel.is_set():
                    raise Cancelled("stopped while waiting")
                place = self._line.index(job)
                if place == 0 and not self._running:
                    self._running = True
                    return
                if place != shown:
                    shown = place
                    job.show("Waiting", f"{place} before you in the queue")
                self._changed.wait(0.2)
