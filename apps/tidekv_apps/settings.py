"""What the operator and the user can set, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ConfigError

MAX_QUESTION_CHARACTERS = 20_000
MAX_ANSWER_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one user, and all of them together, may take.

    Args:
        files: documents per visit.
        file_bytes: one uploaded file.
        visit_bytes: all files of a visit.
        owner_bytes: all files of one owner's visits.
        stored_bytes: all files of all visits.
        text_bytes: the text of an owner's files, in memory.
        all_text_bytes: the text of everybody's files.
        upload_folder_bytes: all files on the server.
        uploads: uploaded files on the server that wait to be added; one address takes at most half.
        upload_seconds: longest time for an upload, and for an uploaded file to wait until it is added.
        pages: pages per file.
        characters: characters of text per file.
        parse_memory_bytes: memory of the child process that reads a PDF.
        parse_seconds: CPU time of that process, and its deadline.
        reading_seconds: for all files of an owner, within ten minutes.
        visits: browser tabs at once; one address takes at most half.
        visits_per_owner: tabs of one browser at once.
        listener_seconds: an API call goes on for so long with nobody waiting for its result.
        idle_seconds: after this long without a request a visit is closed.
        waiting_jobs: questions in the queue; more are refused.
        store_bytes: prefix stores of all visits together; the least recently used ones go first.
    """

    files: int = 20
    file_bytes: int = 100 << 20
    visit_bytes: int = 300 << 20
    owner_bytes: int = 600 << 20
    stored_bytes: int = 4 << 30
    text_bytes: int = 256 << 20
    all_text_bytes: int = 2 << 30
    upload_folder_bytes: int = 2 << 30
    uploads: int = 400
    upload_seconds: float = 600.0
    pages: int = 5000
    characters: int = 20_000_000
    parse_memory_bytes: int = 1 << 30
    parse_seconds: int = 60
    reading_seconds: float = 240.0
    visits: int = 200
    visits_per_owner: int = 20
    listener_seconds: float = 15.0
    idle_seconds: float = 7200.0
    waiting_jobs: int = 32
    store_bytes: int = 2 << 30


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How the app is started.

    Args:
        models: names a user may choose from; the first is loaded at the start.
        host: address to listen on.
        port: port; None takes the first free one from 7860 on.
        auth: user name and password, or None for no login.
        device: where the models run; None chooses.
        dtype: of the weights; None chooses.
        load_options: further keywords of ``TideKV.from_pretrained``.
        context_window: most tokens of prompt and answer; None takes the model's own.
        limits: what users may take.
    """

    models: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int | None = None
    auth: tuple[str, str] | None = None
    device: str | None = None
    dtype: str | None = None
    load_options: dict[str, Any] = field(default_factory=dict)
    context_window: int | None = None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class AskSettings:
    """One user's settings; they apply to the next question.

    Args:
        model: one of the operator's models.
        context_window: most tokens, prompt and answer; None for the model's own.
        kept_tokens: KV positions kept per layer.
        chunk_size: prompt tokens per step, or "auto".
        selector: who stays.
        layer_budget: how the budget is cut between layers.
        head_budget: how a layer's budget is cut between KV heads.
        schedule: how the cache is built.
        max_new_tokens: longest answer.
        temperature: 0 takes the most likely token.
        top_p: nucleus sampling.
        top_k: 0 for no limit.
        seed: makes sampling repeatable.
        retrieval: send only the pages that match the question best (BM25) when not all fit.
    """

    model: str
    context_window: int | None = None
    kept_tokens: int = 1024
    chunk_size: int | str = "auto"
    selector: str = "snapkv"
    layer_budget: str = "uniform"
    head_budget: str = "uniform"
    schedule: str = "tidekv"
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    retrieval: bool = False

    def prefill(self) -> PrefillConfig:
        """The engine's configuration.

        Raises:
            ConfigError: an option is impossible.
        """
        return PrefillConfig(
            kept_tokens=self.kept_tokens,
            chunk_size=self.chunk_size,  # type: ignore[arg-type]
            selector=self.selector,
            layer_budget=self.layer_budget,
            head_budget=self.head_budget,
            schedule=self.schedule,
        )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of ``ask`` that shape the answer."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
        }

    def change(self, models: tuple[str, ...], **changes: Any) -> AskSettings:
        """A checked copy with some settings changed.

        Raises:
            ConfigError: a value is impossible, or a model is not one of the operator's.
        """
        unknown = sorted(set(changes) - set(self.__dataclass_fields__))
        if unknown:
            raise ConfigError(
                f"unknown setting {unknown[0]!r}; the settings are {', '.join(self.__dataclass_fields__)}"
            )
        changed = replace(self, **{name: _clean(name, value) for name, value in changes.items()})
        if changed.model not in models:
            raise ConfigError("that model is not offered here; choose one of the list")
        _between("max_new_tokens", changed.max_new_tokens, 1, MAX_ANSWER_TOKENS)
        _between("temperature", changed.temperature, 0, 10)
        _between("top_p", changed.top_p, 1e-6, 1)
        _between("top_k", changed.top_k, 0, 1_000_000)
        if changed.context_window is not None:
            _between("context_window", changed.context_window, 64, 1 << 24)
        changed.prefill()
        return changed


_WHOLE = frozenset({"context_window", "kept_tokens", "max_new_tokens", "top_k", "seed"})
_OPTIONAL = frozenset({"context_window", "seed"})


def _clean(name: str, value: Any) -> Any:
    """A form's value in the field's own type; an empty optional field is None."""
    if name in _OPTIONAL and value in (None, ""):
        return None
    if name == "chunk_size":
        return value if value == "auto" else _whole(name, value)
    if name in _WHOLE:
        return _whole(name, value)
    if name in ("temperature", "top_p"):
        return _number(name, value)
    if name == "retrieval":
        return bool(value)
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r} must be text")
    return value


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={str(value)[:40]!r} must be a number") from None


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not number.is_integer():
        raise ConfigError(f"{name}={number:g} must be a whole number")
    return int(number)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value:g} must be between {low:g} and {high:g}")
