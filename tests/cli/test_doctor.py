from __future__ import annotations

from pathlib import Path

import pytest

from tidekv_llm.cli import doctor as module
from tidekv_llm.cli.doctor import Check, doctor
from tidekv_llm.models import embedded


def test_report_covers_what_can_go_wrong() -> None:
    checks = {check.item: check for check in doctor()}
    assert {
        "Python",
        "torch",
        "transformers",
        "GPU",
        "flash-attn",
        "RAM",
        "CPU",
        "cache folder",
        "pypdf",
    } <= set(checks)
    assert checks["Python"].ok
    assert all(check.value for check in checks.values())
    assert all("\n" not in f"{check.value}{check.hint}" for check in checks.values())
    assert all(check.hint for check in checks.values() if not check.ok)


def test_look_that_fails_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise RuntimeError("driver\nmissing")

    monkeypatch.setattr(module, "_gpu", broken)
    line = next(check for check in doctor() if check.item == "GPU")
    assert not line.ok
    assert "driver missing" in line.value


def test_old_release_is_said_with_the_remedy() -> None:
    assert module._versioned("torch", "2.13.0+cpu", (2, 9)).ok
    old = module._versioned("torch", "2.8.1", (2, 9))
    assert (old.ok, old.hint) == (False, "pip install --upgrade 'torch>=2.9'")


def test_cache_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(embedded, "needed_bytes", lambda already_have_gguf: 10**18)
    line = module._cache_folder()
    assert not line.ok
    assert "TIDEKV_CACHE" in line.hint
