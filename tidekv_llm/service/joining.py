"""Calls that wait for the same model and ask about the same thing, answered in one turn.

LangChain's ``batch`` and a gathered ``aquery`` start one call after another, each on a thread of its own. The first
that gets its turn takes along those of its kind that have come by then.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV

# How long the first of a batch waits for those that are started with it.
GATHER_SECONDS = 0.01

Tell = Callable[[int, Any], None]
"""Told a call's number and its Reply, or the error that stopped it."""


class JoinableCall(ABC):
    """A model call that others of the same :attr:`key` can be answered together with; None: with no other."""

    key: str | None

    def joins(self, other: JoinableCall) -> bool:
        """Whether both can be answered in one turn."""
        return self.key is not None and other.key == self.key

    @abstractmethod
    def __call__(self, engine: TideKV, emit: Callable[[Any], None], cancel: threading.Event) -> Any:
        """The Reply to this call alone, its deltas told to ``emit``."""

    @abstractmethod
    def together(self, engine: TideKV, waiters: Sequence[Waiter], tell: Tell) -> None:
        """Answer the calls of all these waiters, this one among them."""


@dataclass(eq=False)
class Waiter:
    """A call in the line."""

    call: Any
    cancel: threading.Event


@dataclass
class Companions:
    """The calls that wait for one engine and may be answered together."""

    _waiting: list[Waiter] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, waiter: Waiter) -> None:
        """Wait with the others."""
        with self._lock:
            self._waiting.append(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Wait no more."""
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def claim(self, waiter: Waiter) -> list[Waiter]:
        """All of the kind of ``waiter``, to be answered now; none if it was answered with another."""
        if waiter.call.key is not None:
            time.sleep(GATHER_SECONDS)
        with self._lock:
            if waiter not in self._waiting:
                return []
            key = waiter.call.key
            claimed = [
                other for other in self._waiting if other is waiter or (key is not None and other.call.key == key)
            ]
            self._waiting = [other for other in self._waiting if other not in claimed]
        return claimed
