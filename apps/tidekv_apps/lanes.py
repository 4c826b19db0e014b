"""Whose file is read next.

Nobody knows beforehand how long a file takes. So each is tried in a quick lane, for seconds only; what is not read by
then waits for the slow lane. In both, whoever has used least comes first, and of equal ones the smaller file: nobody's
short text waits for another's slow PDFs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tidekv_apps.settings import Limits
from tidekv_llm.errors import Cancelled, DocumentError, DocumentTimeoutError

Result = TypeVar("Result")
QUICK_SECONDS = 3.0
# Over this time an owner's seconds of reading are summed up.
WINDOW_SECONDS = 600.0


class Lane:
    """Some places, taken in the order of rank.

    Args:
        places: how many may be inside at once.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[float, int, int]] = []
        self._arrivals = 0
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, used: float, size: int, cancel: threading.Event) -> Iterator[None]:
        """Wait for a place behind all of lower (used, size), leave it at the end.

        Raises:
            Cancelled: ``cancel`` was set while waiting.
        """
        self._enter(used, size, cancel)
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _enter(self, used: float, size: int, cancel: threading.Event) -> None:
        with self._changed:
            self._arrivals += 1
            rank = (used, size, self._arrivals)
            self._waiting.append(rank)
            try:
                while not (self._free and min(self._waiting) == rank):
                    if cancel.is_set():
                        raise Cancelled("reading was stopped")
                    self._changed.wait(0.2)
                self._free -= 1
            finally:
                self._waiting.remove(rank)
                self._changed.notify_all()


class ReadingLanes:
    """Reads files for everybody, fairly.

    Args:
        limits: seconds for one file, and for all files of an owner.
        clock: seconds that only grow.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._quick, self._slow, self._counting = Lane(2), Lane(2), Lane(2)
        self._spent: dict[str, deque[tuple[float, float]]] = {}
        self._lock = threading.Lock()

    def read(self, owner: str, size: int, cancel: threading.Event, attempt: Callable[[float], Result]) -> Result:
        """What ``attempt`` returns; it is given the seconds that it may take, and tried twice at most.

        Raises:
            Cancelled: ``cancel`` was set while waiting.
            DocumentError: the owner's files have taken too long already, or this one did.
        """
        try:
            return self._run(self._quick, QUICK_SECONDS, owner, size, cancel, attempt)
        except DocumentTimeoutError:
            if self._limits.parse_seconds <= QUICK_SECONDS:
                raise
        return self._run(self._slow, self._limits.parse_seconds, owner, size, cancel, attempt)

    def count(self, owner: str, cancel: threading.Event, work: Callable[[], Result]) -> Result:
        """What ``work`` returns, which counts the tokens of a text; it is the owner's time too.

        Raises:
            Cancelled: ``cancel`` was set while waiting.
        """
        with self._counting.turn(self.spent(owner), 0, cancel):
            begun = self._clock()
            try:
                return work()
            finally:
                self._charge(owner, self._clock() - begun)

    def _run(
        self,
        lane: Lane,
        most: float,
        owner: str,
        size: int,
        cancel: threading.Event,
        attempt: Callable[[float], Result],
    ) -> Result:
        with lane.turn(self.spent(owner), size, cancel):
            seconds = min(most, self._limits.parse_seconds, self._left(owner))
            begun = self._clock()
            try:
                return attempt(seconds)
            finally:
                self._charge(owner, self._clock() - begun)

    def _left(self, owner: str) -> float:
        left = self._limits.reading_seconds - self.spent(owner)
        if left <= 0:
            raise DocumentError(
                f"reading your files took {self._limits.reading_seconds:g} s within {WINDOW_SECONDS / 60:g} minutes; "
                "wait a few minutes"
            )
        return left

    def spent(self, owner: str) -> float:
        """Seconds that the owner's files took lately."""
        with self._lock:
            entries = self._spent.get(owner, deque())
            while entries and entries[0][0] < self._clock() - WINDOW_SECONDS:
                entries.popleft()
            return sum(seconds for _, seconds in entries)

    def _charge(self, owner: str, seconds: float) -> None:
        with self._lock:
            now = self._clock()
            self._spent.setdefault(owner, deque()).append((now, seconds))
            over = [one for one, entries in self._spent.items() if entries[-1][0] < now - WINDOW_SECONDS]
            for one in over:
                del self._spent[one]
