"""What users may set, and what only the operator sets."""

from __future__ import annotations

import pytest

from tests.apps.support import MODEL
from tidekv_apps.settings import AskSettings
from tidekv_llm.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept_tokens": 3}, "kept_tokens=3 must be at least"),
        ({"kept_tokens": "many"}, "kept_tokens='many' must be a number"),
        ({"kept_tokens": 99.5}, "whole number"),
        ({"selector": "x"}, "selector='x' is unknown"),
        ({"schedule": "x"}, "schedule='x' is unknown"),
        ({"chunk_size": "0"}, "chunk_size=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"model": "/etc"}, "not offered here"),
        ({"device": "cuda"}, "unknown setting 'device'"),
    ],
    ids=str,
)
def test_impossible_settings_are_named_and_change_nothing(changes: dict[str, object], message: str) -> None:
    settings = AskSettings(model=MODEL)
    with pytest.raises(ConfigError, match=message):
        settings.change((MODEL,), **changes)
    assert settings == AskSettings(model=MODEL)


def test_empty_optional_settings_are_none_and_numbers_come_as_text_too() -> None:
    changed = AskSettings(model=MODEL).change(
        (MODEL,), context_window="", seed="7", chunk_size="512", kept_tokens=300.0, retrieval=True
    )
    assert (changed.context_window, changed.seed, changed.chunk_size, changed.kept_tokens) == (None, 7, 512, 300)
    assert changed.prefill().chunk_size == 512


def test_the_loader_is_asked_for_nothing_but_what_the_operator_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trust_remote_code and no other option ever comes from a user."""
    from tidekv_apps.models import Models
    from tidekv_apps.settings import AppOptions
    from tidekv_llm.engine import TideKV

    seen = {}

    def fake(name: str, **options: object) -> object:
        seen.update(options, name=name)
        raise ConfigError("that was all")

    monkeypatch.setattr(TideKV, "from_pretrained", fake)
    with pytest.raises(ConfigError, match="that was all"):
        Models(AppOptions(models=(MODEL,))).load(MODEL)
    assert set(seen) == {"name", "device", "dtype", "context_window", "load_progress"}
