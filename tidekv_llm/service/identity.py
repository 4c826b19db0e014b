"""What tells one model from another in the key of an answer cache; nothing is loaded for it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.service.pool import EngineHandle

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV


def model_identity(handle: EngineHandle) -> str:
    """A digest that changes with the weights, the tokenizer and its chat template.

    Of an engine that is given, the weights are sampled. Of a model by name, the files are looked at, not read: their
    names, sizes and dates; a model of a hub is told by the commit that lies in the cache.
    """
    engine, place = handle.spec.engine, handle.local_files()
    if engine is not None:
        found = _of_engine(engine)
    elif place is not None:
        found = _of_files(place)
    else:
        found = [handle.spec.model, _cached_commit(handle.spec.model, handle.spec.load_options.get("revision"))]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:32]


def _of_engine(engine: TideKV) -> list[Any]:
    tokenizer: Any = engine.tokenizer
    template, size = getattr(tokenizer, "chat_template", None), 0 if tokenizer is None else len(tokenizer)
    return [engine.cache_owner, str(engine.device), type(tokenizer).__name__, size, template]


def _of_files(place: Path) -> list[Any]:
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _cached_commit(name: str, revision: str | None) -> str:
    """The commit of a hub's model that lies on this machine; empty if none does."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""
