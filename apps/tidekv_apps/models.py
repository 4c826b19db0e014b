"""The operator's models: one in memory at a time, shared by everybody, loaded when a question needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidekv_apps.settings import AppOptions, AskSettings
from tidekv_llm.service import EngineHandle, EnginePool, EngineSpec, ModelFacts

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV


class Models:
    """Hands out engines for one user's settings, and says how far the first model is.

    Args:
        options: which models, where, how long a context, how many questions may wait.
        before_unload: called before a model leaves memory, so that stores made by it can go first.
    """

    def __init__(self, options: AppOptions, before_unload: Callable[[], None] = lambda: None) -> None:
        pool = EnginePool(
            most_loaded=1,
            most_waiting=options.limits.waiting_jobs,
            before_unload=before_unload,
            progress=self._progress,
        )
        assert pool.line is not None
        self.line = pool.line
        self._handles = {name: EngineHandle(_spec(name, options), pool) for name in options.models}
        self._first = options.models[0]
        self.message = "The model is loading"
        self.fraction = 0.0
        self.error: BaseException | None = None
        self.ready = threading.Event()

    def start(self) -> None:
        """Load the first model in the background; :attr:`ready` is set when it is there, or failed."""
        threading.Thread(target=self._load_first, name="tidekv-load", daemon=True).start()

    def _load_first(self) -> None:
        try:
            self.load(self._first)
        except Exception as error:
            self.error = error
        finally:
            self.ready.set()

    def load(self, name: str) -> TideKV:
        """The engine of that model; another one leaves memory first."""
        engine = self._handles[name].engine()
        self.error = None
        return engine

    def engine(self, settings: AskSettings) -> TideKV:
        """An engine with the user's options; the caller closes it."""
        engine = self.load(settings.model).with_prefill(settings.prefill())
        if settings.context_window is not None:
            engine.context_window = min(engine.context_window, settings.context_window)
        return engine

    def facts(self, name: str) -> ModelFacts | None:
        """What is known about a model; None before it was first loaded."""
        return self._handles[name].facts

    def close(self) -> None:
        """Let go of the model."""
        for handle in self._handles.values():
            handle.close()

    def _progress(self, message: str, fraction: float) -> None:
        self.message, self.fraction = message, fraction


def _spec(model: str, options: AppOptions) -> EngineSpec:
    return EngineSpec(model, options.device, options.dtype, options.context_window, options.load_options)
