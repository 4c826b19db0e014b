"""Engines by name: loaded when first used, shared by everyone who names the same model, freed by ``close()``.

An integration's object holds an :class:`EngineHandle`, which is a name and not a model: it can be copied and
pickled at will. Handles that name the same weights meet in one slot:

    handle(prefill=A) ─┐
    handle(prefill=A) ─┼─ slot ── weights, loaded once ── one worker thread, first come, first served
    handle(prefill=B) ─┘
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV


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


class _Slot:
    """Weights that handles share, and the worker thread that uses them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.base: TideKV | None = None
        self.tokenizer: tuple[Any, int] | None = None
        self.users: weakref.WeakSet[EngineHandle] = weakref.WeakSet()
        self._worker: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work; one piece runs at a time."""
        with self.lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="tidekv")
            self._worker.submit(work)

    def acquire(self, handle: EngineHandle) -> TideKV:
        from tidekv_llm.engine import TideKV

        spec = handle.spec
        with self.lock:
            if self.base is None:
                self.base = TideKV.from_pretrained(
                    spec.model,
                    device=spec.device,
                    dtype=spec.dtype,
                    context_window=spec.context_window,
                    **spec.load_options,
                )
            self.users.add(handle)
            return _derive(self.base, spec)

    def release(self, handle: EngineHandle) -> None:
        with self.lock:
            self.users.discard(handle)
            if not self.users:
                self.unload()

    def unload(self) -> None:
        with self.lock:
            if self.base is not None:
                self.base.close()
            if self._worker is not None:
                self._worker.shutdown(wait=False)
            self.base = self._worker = None


_slots: dict[tuple[str, ...], _Slot] = {}
_borrowed: weakref.WeakKeyDictionary[TideKV, _Slot] = weakref.WeakKeyDictionary()
_slots_lock = threading.Lock()


def unload_unused() -> None:
    """Free models whose every user was garbage collected without ``close()``."""
    for slot in list(_slots.values()):
        with slot.lock:
            if not slot.users:
                slot.unload()


def _slot_of(spec: EngineSpec) -> _Slot:
    with _slots_lock:
        if spec.engine is not None:
            return _borrowed.setdefault(spec.engine, _Slot())
        return _slots.setdefault(spec.weights_key, _Slot())


class EngineHandle:
    """A name for an engine.

    Args:
        spec: which one; nothing is loaded until :meth:`engine` is called.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._slot = _slot_of(spec)
        self._engine: TideKV | None = None
        self._closed = False

    def engine(self) -> TideKV:
        """The engine, loaded if need be (that takes seconds: not on an event loop).

        Raises:
            ClosedError: after :meth:`close`.
            ModelError: it cannot be loaded.
        """
        with self._slot.lock:
            self._check_open()
            if self._engine is None:
                self._engine = self._slot.acquire(self) if self.spec.engine is None else self._borrow(self.spec.engine)
            return self._engine

    def _borrow(self, engine: TideKV) -> TideKV:
        """The given engine itself, with its prefix cache, unless other options are wanted."""
        plain = self.spec.prefill is None and self.spec.prefix_cache_bytes is None
        return engine if plain else _derive(engine, self.spec)

    def close(self) -> None:
        """Let go of the weights; they are freed when no open handle uses them. A given ``engine`` stays open."""
        with self._slot.lock:
            self._closed = True
            if self._engine is not None and self._engine is not self.spec.engine:
                self._engine.close()
            self._engine = None
            if self.spec.engine is None:
                self._slot.release(self)

    @property
    def loaded(self) -> bool:
        """Whether this handle uses the weights now."""
        return self._engine is not None

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work on the model's worker thread.

        Raises:
            ClosedError: after :meth:`close`.
        """
        self._check_open()
        self._slot.submit(work)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this object was closed; make a new one")

    # --- questions that need no weights -----------------------------------------------------------------

    def tokenizer(self) -> Any:
        """The model's own tokenizer, read without the weights if they are not there."""
        return self._tokenizer_and_window()[0]

    def context_window(self) -> int:
        """Most tokens, prompt and answer together."""
        quick = None if self._engine is not None else self.quick_window()
        return quick or self._tokenizer_and_window()[1]

    def has_chat_template(self) -> bool:
        """Whether messages can be sent."""
        folder = None if self._engine is not None else self._local_folder()
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
        spec = self.spec
        with self._slot.lock:
            self._check_open()
            engine = self._engine or spec.engine
            if engine is not None:
                return _tokenizer_of(engine), engine.context_window
            if self._slot.tokenizer is None:
                from tidekv_llm.models import load_tokenizer

                loaded = load_tokenizer(spec.model, context_window=spec.context_window, **spec.load_options)
                self._slot.tokenizer = (loaded.tokenizer, loaded.context_window)
            return self._slot.tokenizer

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
        return EngineHandle(self.spec)


def _derive(base: TideKV, spec: EngineSpec) -> TideKV:
    """An engine of one's own on the weights of another."""
    engine = base.with_prefill(**_options(spec.prefill))
    if spec.prefix_cache_bytes is None:
        return engine
    with engine:  # closed again: only its options were needed
        return engine.with_prefix_cache(spec.prefix_cache_bytes)


def _tokenizer_of(engine: TideKV) -> Any:
    if engine.tokenizer is None:
        raise ConfigError("this engine has no tokenizer; pass one to TideKV(...)")
    return engine.tokenizer


def _options(prefill: PrefillConfig | None) -> dict[str, Any]:
    """All options by name; ``asdict`` would copy a selector object."""
    return {} if prefill is None else {item.name: getattr(prefill, item.name) for item in fields(prefill)}


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
