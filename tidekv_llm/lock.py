"""A lock that is handed over in the order of asking and can be given up on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidekv_llm.errors import BusyError, Cancelled

_POLL_SECONDS = 0.05


class Ticket:
    """A place in the queue of a :class:`FairLock`."""


class FairLock:
    """First come, first served; a waiter whose ``cancel`` is set leaves the queue.

    Args:
        most_waiting: how many may wait behind the one who holds the lock; None for any number.
    """

    def __init__(self, most_waiting: int | None = None) -> None:
        self._most_waiting = most_waiting
        self._condition = threading.Condition()
        self._queue: deque[Ticket] = deque()

    @property
    def waiting(self) -> int:
        """How many hold the lock or wait for it."""
        return len(self._queue)

    def join(self) -> Ticket:
        """Take a place at the end, to be used with :meth:`hold` later; never blocks for long.

        Raises:
            BusyError: too many wait already.
        """
        ticket = Ticket()
        with self._condition:
            if self._most_waiting is not None and len(self._queue) > self._most_waiting:
                raise BusyError(f"{len(self._queue)} requests are waiting already; try again in a minute")
            self._queue.append(ticket)
        return ticket

    @contextmanager
    def hold(
        self,
        cancel: threading.Event | None = None,
        *,
        ticket: Ticket | None = None,
        on_place: Callable[[int], None] | None = None,
    ) -> Iterator[None]:
        """Wait for the turn and hold the lock inside the block; the place is given up in any case.

        Args:
            cancel: set it to stop waiting.
            ticket: a place that was taken before; None joins at the end.
            on_place: told how many are before this one, whenever that changes and is not 0.

        Raises:
            Cancelled: ``cancel`` was set before the turn came.
            BusyError: too many wait already.
        """
        ticket = ticket or self.join()
        try:
            self._wait(ticket, cancel, on_place)
            yield
        finally:
            with self._condition:
                self._queue.remove(ticket)
                self._condition.notify_all()

    def _wait(self, ticket: Ticket, cancel: threading.Event | None, on_place: Callable[[int], None] | None) -> None:
        told = 0
        with self._condition:
            while True:
                if cancel is not None and cancel.is_set():
                    raise Cancelled("stopped on request while waiting for the model")
                place = self._queue.index(ticket)
                if place == 0:
                    return
                if on_place is not None and place != told:
                    on_place(place)
                    told = place
                self._condition.wait(_POLL_SECONDS if cancel is not None else None)
