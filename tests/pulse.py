"""Whether an event loop goes on, told by counting: slow work waits until the loop has come round often enough."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
GIVE_UP_SECONDS = 60.0  # only a loop that stands still takes so long


class Pulse:
    """Counts how often an event loop comes round."""

    def __init__(self) -> None:
        self.beats = 0
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work`` on a loop whose turns are counted."""

        async def beat() -> None:
            while True:
                self.beats += 1
                await asyncio.sleep(0.001)

        async def both() -> Result:
            self._thread = threading.current_thread()
            pulse = asyncio.create_task(beat())
            try:
                return await work
            finally:
                self._thread = None
                pulse.cancel()

        return asyncio.run(both())

    def wait(self, beats: int = 20) -> None:
        """Slow work: return once the loop, if it runs, has come round so many times more."""
        assert threading.current_thread() is not self._thread, "this was done on the event loop"
        goal, end = self.beats + beats, time.monotonic() + GIVE_UP_SECONDS
        while self._thread is not None and self.beats < goal:
            assert time.monotonic() < end, "the event loop stands still"
            time.sleep(0.001)
