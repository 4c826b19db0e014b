"""Engines by name: loaded when first used, shared by everyone who names the same model, freed by ``close()``.

A caller holds an :class:`EngineHandle`, which is a name and not a model: it can be copied and pickled at will.
Handles that name the same weights meet in one slot:

    handle(prefill=A) ─┐
    handle(prefill=A) ─┼─ slot ── weights, loaded once ── one request at a time, first come, first served
    handle(prefill=B) ─┘

No lock is held while a model loads, so that an event loop can ask for anything but the engine itself.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ClosedError, ConfigError
from tidekv_llm.lock import FairLock, Ticket
from tidekv_llm.service.joining import Companions

if TYPE_CHECKING:
    import torch

    from tidekv_llm.engine import TideKV
    from tidekv_llm.shapes import ModelShape


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides which engine is meant.

    Args:
        model: alias, folder, GGUF file or hub id.
        device: as in ``TideKV.from_pretrained``, like the next three.
        dtype: of the weights.
        context_window: most tokens, prompt and answer together.
        load_options: further keywords of ``from_pretrained``.
        prefill: how the cache is built.
        prefix_cache_bytes: host memory for what consecutive prompts share; None reuses nothing.
        engine: an engine that exists already, used instead of loading one.
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    context_window: int | None = None
    load_options: dict[str, Any] = field(default_factory=dict)
    prefill: PrefillConfig | None = None
    prefix_cache_bytes: int | None = None
    engine: TideKV | None = None

    @property
    def weights_key(self) -> tuple[str, ...]:
        """Equal for specs that can share weights."""
        options = sorted((key, repr(value)) for key, value in self.load_options.items())
        return tuple(map(repr, (self.model, self.device, self.dtype, self.context_window, options)))


@dataclass(frozen=True)
class ModelFacts:
    """What stays known about a model when its weights have left memory.

    Attributes:
        name: as it was asked for.
        tokenizer: counts tokens.
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
    """Where engines are kept.

    Args:
        most_loaded: models in memory at once; the one that was loaded first makes way. A pool with such a limit
            serves one request at a time over all its models, or one might leave memory while it is used.
        most_waiting: how many requests may wait; more are refused with :class:`BusyError`.
        before_unload: called before a model makes way, so that what was made by it can go first.
        progress: told what a load does and how far it is, from 0 to 1.
    """

    def __init__(
        self,
        *,
        most_loaded: int | None = None,
        most_waiting: int | None = None,
        before_unload: Callable[[], None] = lambda: None,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self._most_loaded, self._before_unload, self._progress = most_loaded, before_unload, progress
        self._most_waiting = most_waiting
        self.line = None if most_loaded is None else FairLock(most_waiting)
        self._slots: weakref.WeakValueDictionary[tuple[str, ...], _Slot] = weakref.WeakValueDictionary()
        self._borrowed: weakref.WeakKeyDictionary[TideKV, _Slot] = weakref.WeakKeyDictionary()
        self._loaded: list[_Slot] = []
        self._lock, self._making_room = threading.Lock(), threading.Lock()

    def slot(self, spec: EngineSpec) -> _Slot:
        """The place of the weights that ``spec`` names."""
        made = _Slot(self, self.line or FairLock(self._most_waiting))
        with self._lock:
            if spec.engine is not None:
                return self._borrowed.setdefault(spec.engine, made)
            return self._slots.setdefault(spec.weights_key, made)

    def load(self, slot: _Slot, spec: EngineSpec) -> TideKV:
        """Load the weights of ``spec``, after others have made way for them where there is a limit."""
        if self._most_loaded is None:
            return self._from_pretrained(spec)
        with self._making_room:
            self._loaded = [other for other in self._loaded if other.loaded and other is not slot]
            while len(self._loaded) >= self._most_loaded:
                self._before_unload()
                self._loaded.pop(0).unload()
            engine = self._from_pretrained(spec)
            self._loaded.append(slot)
            return engine

    def _from_pretrained(self, spec: EngineSpec) -> TideKV:
        from tidekv_llm.engine import TideKV

        options = (
            spec.load_options if self._progress is None else {**spec.load_options, "load_progress": self._progress}
        )
        return TideKV.from_pretrained(
            spec.model, device=spec.device, dtype=spec.dtype, context_window=spec.context_window, **options
        )


class _Slot:
    """Weights that handles share, an engine of each handle on them, and whose turn it is."""

    def __init__(self, pool: EnginePool, line: FairLock) -> None:
        self.line, self._pool = line, pool
        self.facts: ModelFacts | None = None
        self.reading = threading.Lock()
        self.tokenizer: tuple[Any, int] | None = None
        self._lock = threading.RLock()  # held for a blink only: event loops wait for it
        self._base: Future[TideKV] | None = None
        self._engines: weakref.WeakKeyDictionary[EngineHandle, TideKV | None] = weakref.WeakKeyDictionary()

    @property
    def loaded(self) -> bool:
        """Whether the weights are in memory, or on their way."""
        return self._base is not None

    def engine_of(self, handle: EngineHandle) -> TideKV | None:
        """The handle's engine if it has one already."""
        return self._engines.get(handle)

    def engine(self, handle: EngineHandle) -> TideKV:
        """The handle's engine, loading the weights if need be."""
        with self._lock:
            self._engines.setdefault(handle, None)  # a user from now on: nobody unloads what it waits for
        base = handle.spec.engine or self._weights(handle.spec)
        with self._lock:
            if handle.closed:
                self.release(handle)
                handle.check_open()
            engine = self._engines[handle] = self._engines.get(handle) or _derive(base, handle.spec)
            return engine

    def _weights(self, spec: EngineSpec) -> TideKV:
        """The weights, loaded by whoever comes first; the others wait for that load, and fail with it."""
        with self._lock:
            found, mine = self._base, self._base is None
            loading = self._base = found or Future()
        if mine:
            try:
                engine = self._pool.load(self, spec)
                self.facts = _facts(spec.model, engine)
                loading.set_result(engine)
            except BaseException as error:
                self._base = None
                loading.set_exception(error)
        return loading.result()

    def release(self, handle: EngineHandle) -> None:
        """Close the handle's engine; the weights go with the last one."""
        with self._lock:
            self._close(handle, self._engines.pop(handle, None))
            if not self._engines and self._base is not None and self._base.done():
                self.unload()

    def unload(self) -> None:
        """Free the weights; whoever asks for them next loads them again."""
        with self._lock:
            for handle, engine in list(self._engines.items()):
                self._close(handle, engine)
            self._engines.clear()
            base, self._base = self._base, None
        if base is not None:
            base.result().close()

    def _close(self, handle: EngineHandle, engine: TideKV | None) -> None:
        if engine is not None and engine is not handle.spec.engine:
            engine.close()


_shared = EnginePool()


class EngineHandle:
    """A name for an engine.

    Args:
        spec: which one; nothing is loaded until :meth:`engine` is called.
        pool: where it is kept; None for the one that all frameworks of this process share.
    """

    def __init__(self, spec: EngineSpec, pool: EnginePool | None = None) -> None:
        self.spec = spec
        self._pool = pool or _shared
        self._slot = self._pool.slot(spec)
        self.companions = Companions()
        self.closed = False

    def engine(self) -> TideKV:
        """The engine, loaded if need be (that takes seconds: not on an event loop).

        Raises:
            ClosedError: after :meth:`close`.
            ModelError: it cannot be loaded.
        """
        self.check_open()
        return self._slot.engine_of(self) or self._slot.engine(self)

    def close(self) -> None:
        """Let go of the weights; they are freed when no open handle uses them. A given ``engine`` stays open."""
        self.closed = True
        self._slot.release(self)

    @property
    def loaded(self) -> bool:
        """Whether this handle uses the weights now."""
        return self._slot.engine_of(self) is not None

    @property
    def facts(self) -> ModelFacts | None:
        """What is known of the model since it was first loaded; None before."""
        return self._slot.facts

    def join(self) -> Ticket:
        """Take a place in the model's line; never blocks.

        Raises:
            ClosedError: after :meth:`close`.
            BusyError: too many wait already.
        """
        self.check_open()
        return self._slot.line.join()

    @contextmanager
    def turn(self, ticket: Ticket, cancel: threading.Event) -> Iterator[TideKV]:
        """Wait for the turn of the ticket, then the engine; nobody else uses the model inside the block.

        Raises:
            Cancelled: ``cancel`` was set before the turn came.
            ModelError: the engine cannot be loaded.
        """
        with self._slot.line.hold(cancel, ticket=ticket):
            yield self.engine()

    def check_open(self) -> None:
        """Raise :class:`ClosedError` after :meth:`close`."""
        if self.closed:
            raise ClosedError("this object was closed; make a new one")

    # --- questions that need no weights -----------------------------------------------------------------

    def tokenizer(self) -> Any:
        """The model's own tokenizer, read without the weights if they are not there."""
        return self._tokenizer_and_window()[0]

    def context_window(self) -> int:
        """Most tokens, prompt and answer together."""
        quick = None if self.loaded else self.quick_window()
        return quick or self._tokenizer_and_window()[1]

    def has_chat_template(self) -> bool:
        """Whether messages can be sent."""
        folder = None if self.loaded else self._local_folder()
        if folder is not None and self._slot.tokenizer is None:
            return _folder_has_template(folder)
        return bool(getattr(self.tokenizer(), "chat_template", None))

    def quick_window(self) -> int | None:
        """The context window where a look into a local file tells, else None; imports nothing heavy."""
        if self.spec.engine is not None:
            return self.spec.engine.context_window
        if self.spec.context_window is not None:
            return self.spec.context_window
        folder = self._local_folder()
        config = {} if folder is None else _read_json(folder / "config.json")
        text = config.get("text_config") or config
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        window = text.get("max_position_embeddings")
        yarn = "yarn" in (scaling.get("rope_type"), scaling.get("type"))
        return window if isinstance(window, int) and not yarn else None

    def _tokenizer_and_window(self) -> tuple[Any, int]:
        self.check_open()
        engine = self._slot.engine_of(self) or self.spec.engine
        if engine is not None:
            return _tokenizer_of(engine), engine.context_window
        with self._slot.reading:
            self._slot.tokenizer = self._slot.tokenizer or self._read_tokenizer()
        return self._slot.tokenizer

    def _read_tokenizer(self) -> tuple[Any, int]:
        from tidekv_llm.models import load_tokenizer

        spec = self.spec
        loaded = load_tokenizer(spec.model, context_window=spec.context_window, **spec.load_options)
        return loaded.tokenizer, loaded.context_window

    def local_files(self) -> Path | None:
        """The model's folder or GGUF file on this machine, if that is known without asking anyone."""
        file = Path(self.spec.model).expanduser()
        return self._local_folder() or (file if self.spec.engine is None and file.exists() else None)

    def _local_folder(self) -> Path | None:
        """Where the model's files lie, if that is known without asking anyone."""
        from tidekv_llm.models import embedded

        if self.spec.engine is not None:
            return None
        if self.spec.model == embedded.ALIAS:
            folder = embedded.embedded_folder()
            return folder if embedded.is_cached(folder) else None
        folder = Path(self.spec.model).expanduser()
        return folder if (folder / "config.json").is_file() else None

    # --- copies -----------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[type[EngineHandle], tuple[EngineSpec]]:
        if self.spec.engine is not None:
            raise TypeError("an object made with engine= cannot be pickled; name the model with model= instead")
        return EngineHandle, (self.spec,)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHandle:
        return EngineHandle(self.spec, self._pool)


def _derive(base: TideKV, spec: EngineSpec) -> TideKV:
    """An engine of one's own on the weights of another; a given one as it is, unless other options are wanted."""
    if base is spec.engine and spec.prefill is None and spec.prefix_cache_bytes is None:
        return base
    engine = base.with_prefill(spec.prefill)
    if spec.prefix_cache_bytes is None:
        return engine
    with engine:  # closed again: only its options were needed
        return engine.with_prefix_cache(spec.prefix_cache_bytes)


def _facts(name: str, engine: TideKV) -> ModelFacts:
    return ModelFacts(name, engine.tokenizer, engine.shape, engine.context_window, engine.devices)


def _tokenizer_of(engine: TideKV) -> Any:
    if engine.tokenizer is None:
        raise ConfigError("this engine has no tokenizer; pass one to TideKV(...)")
    return engine.tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _folder_has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(_read_json(folder / "tokenizer_config.json").get("chat_template"))
