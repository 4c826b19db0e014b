"""One request's progress, cancellation and timings, handed down the path instead of kept in globals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidekv_llm.errors import Cancelled


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prefill is.

    Attributes:
        layer: 1-based number of the active layer.
        layers: layers in all.
        chunk: 1-based number of the chunk just finished.
        chunks: chunks of this layer.
        fraction: share of the work done, by arithmetic operations, from 0 to 1.
        eta_seconds: estimate of the time left.
    """

    layer: int
    layers: int
    chunk: int
    chunks: int
    fraction: float
    eta_seconds: float


ProgressCallback = Callable[[Progress], None]


@dataclass
class Request:
    """What accompanies one request through the engine.

    Args:
        progress: called after every chunk step.
        cancel: checked before every chunk step.
    """

    progress: ProgressCallback | None = None
    cancel: threading.Event | None = None
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def check_cancelled(self) -> None:
        """Raise :class:`Cancelled` if the caller asked to stop."""
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled("stopped on request; the engine can be used again")

    def report(self, layer: int, layers: int, chunk: int, chunks: int, fraction: float) -> None:
        """Tell the progress callback."""
        if self.progress is None:
            return
        elapsed = time.perf_counter() - self.started
        eta = elapsed * (1 - fraction) / fraction if fraction > 0 else float("inf")
        self.progress(Progress(layer, layers, chunk, chunks, fraction, eta))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds[name]``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
