"""Whether anybody still waits for an answer.

A browser tab that is closed breaks off its events by itself. An API client that goes away leaves them behind, and
nobody else would wait for them: they are cancelled, whether they run or wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Presence:
    """Who listens to which event.

    Args:
        patience: seconds that an event goes on with nobody listening: a client may be late, or connect again.
        clock: seconds that only grow.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._listening: Counter[str] = Counter()
        self._left: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def listening(self, name: str) -> Iterator[None]:
        """Somebody listens to an event or to all events of a session, by its id, inside the block."""
        with self._lock:
            self._listening[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._listening[name] -= 1
                self._left[name] = self._clock()
                if not self._listening[name]:
                    del self._listening[name]
                self._forget_old()

    def watch(self, *names: str) -> Callable[[], bool]:
        """A question to ask again and again: has nobody listened to any of these for too long?"""
        begun = self._clock()

        def gone() -> bool:
            with self._lock:
                if any(name in self._listening for name in names):
                    return False
                last = max((self._left.get(name, begun) for name in names), default=begun)
                return self._clock() - max(begun, last) > self._patience

        return gone

    def _forget_old(self) -> None:
        old = self._clock() - self._patience
        self._left = {name: left for name, left in self._left.items() if left > old}
