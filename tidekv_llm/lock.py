"""A lock that is handed over in the order of asking and can be given up on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tidekv_llm.errors import Cancelled

_POLL_SECONDS = 0.05


class FairLock:
    """First come, first served; a waiter whose ``cancel`` is set leaves the queue."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._queue: deque[object] = deque()

    @property
    def waiting(self) -> int:
        """How many hold the lock or wait for it."""
        return len(self._queue)

    @contextmanager
    def hold(self, cancel: threading.Event | None = None) -> Iterator[None]:
        """Wait for the turn and hold the lock inside the block.

        Raises:
            Cancelled: ``cancel`` was set while waiting.
        """
        ticket = object()
        with self._condition:
            self._queue.append(ticket)
            while self._queue[0] is not ticket:
                self._condition.wait(_POLL_SECONDS if cancel is not None else None)
                if cancel is not None and cancel.is_set() and self._queue[0] is not ticket:
                    self._leave(ticket)
                    raise Cancelled("stopped on request while waiting for the model")
        try:
            yield
        finally:
            with self._condition:
                self._leave(ticket)

    def _leave(self, ticket: object) -> None:
        self._queue.remove(ticket)
        self._condition.notify_all()
