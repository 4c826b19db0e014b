"""The models: one in memory at a time, shared by everybody, loaded when a question needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidekv_apps.settings import AppOptions, AskSettings

if TYPE_CHECKING:
    import torch

    from tidekv_llm.engine import TideKV
    from tidekv_llm.shapes import ModelShape


@dataclass(frozen=True)
class ModelFacts:
    """What stays known about a model when it is not in memory.

    Attributes:
        name: as the operator gave it.
        tokenizer: counts tokens for the budget bar.
        shape: dimensions, for the planner.
        context_window: most tokens it can take.
        devices: where it runs, such as ``cuda:1``; several for a model that is spread.
    """

    name: str
    tokenizer: Any
    shape: ModelShape
    context_window: int
    devices: tuple[torch.device, ...]


class EnginePool:
    """Loads models and hands out engines for one user's settings.

    Args:
        options: which models, where, how long a context.
        before_unload: called before a model leaves memory, so that stores made by it can go first.
    """

    def __init__(self, options: AppOptions, before_unload: Callable[[], None] = lambda: None) -> None:
        self._options = options
        self.before_unload = before_unload
        self._base: TideKV | None = None
        self._loaded = ""
        self._facts: dict[str, ModelFacts] = {}
        self._lock = threading.RLock()
        self.message = "The model is loading"
        self.fraction = 0.0
        self.error: BaseException | None = None
        self.ready = threading.Event()

    def start(self) -> None:
        """Load the first model in the background; :attr:`ready` is set when it is there, or failed."""
        threading.Thread(target=self._load_first, name="tidekv-load", daemon=True).start()

    def _load_first(self) -> None:
        try:
            self.load(self._options.models[0])
        except Exception as error:
            self.error = error
        finally:
            self.ready.set()

    def load(self, name: str) -> TideKV:
        """The engine of that model; another one leaves memory first."""
        from tidekv_llm.engine import TideKV

        with self._lock:
            if self._base is not None and self._loaded == name:
                return self._base
            self.close()
            self._base = TideKV.from_pretrained(
                name,
                device=self._options.device,
                dtype=self._options.dtype,
                context_window=self._options.context_window,
                load_progress=self._progress,
            )
            self._loaded, self.error = name, None
            self._facts[name] = _facts(name, self._base)
            return self._base

    def engine(self, settings: AskSettings) -> TideKV:
        """An engine with the user's options; the caller closes it."""
        with self._lock:
            config = settings.prefill()
            changes = {field: getattr(config, field) for field in config.__dataclass_fields__}
            engine = self.load(settings.model).with_prefill(**changes)
            if settings.context_window is not None:
                engine.context_window = min(engine.context_window, settings.context_window)
            return engine

    def facts(self, name: str) -> ModelFacts | None:
        """What is known about a model; None before it was first loaded."""
        return self._facts.get(name)

    def close(self) -> None:
        """Let go of the model."""
        with self._lock:
            if self._base is not None:
                self.before_unload()
                self._base.close()
            self._base, self._loaded = None, ""

    def _progress(self, message: str, fraction: float) -> None:
        self.message, self.fraction = message, fraction


def _facts(name: str, engine: TideKV) -> ModelFacts:
    return ModelFacts(name, engine.tokenizer, engine.shape, engine.context_window, engine.devices)
