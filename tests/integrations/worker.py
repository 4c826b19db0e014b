"""The model's worker thread, counted and held: what a cancelled request does not compute, not how soon it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tidekv_llm.decode.plain import PlainDecoder
from tidekv_llm.hf import Decoder

HANG = 300.0  # seconds that only a deadlock takes


class Worker:
    """Counts how often any model runs a layer over a chunk, or a decode step, and can stop the worker at a certain run.

    Attributes:
        runs: since :meth:`reset`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self._hold_at: int | None = None
        self._arrived, self._go = threading.Event(), threading.Event()

        def counted(real: Any) -> Any:
            def run(*given: Any, **named: Any) -> Any:
                self.runs += 1
                if self.runs == self._hold_at:
                    self._arrived.set()
                    assert self._go.wait(HANG), "nobody let the worker go on"
                return real(*given, **named)

            return run

        monkeypatch.setattr(Decoder, "run_layer", counted(Decoder.run_layer))
        monkeypatch.setattr(PlainDecoder, "step", counted(PlainDecoder.step))

    @contextmanager
    def held(self, at: int = 1) -> Iterator[None]:
        """In the block, the worker stops in its run number ``at`` from here and goes on when the block ends."""
        self.runs, self._hold_at = 0, at
        self._arrived.clear()
        self._go.clear()
        try:
            yield
        finally:
            self._go.set()
            self._hold_at = None

    def wait_until_held(self) -> None:
        assert self._arrived.wait(HANG), "the worker never got there"

    def runs_of(self, work: Any) -> int:
        """How many runs ``work()`` takes."""
        self.runs = 0
        work()
        return self.runs


def finish(llm: Any) -> None:
    """Wait until nobody uses the model any more."""
    with llm.engine_handle()._slot.line.hold():
        pass
