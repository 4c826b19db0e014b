"""Fixtures that more than one test folder uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidekv_llm.hardware import limit_libraries

# Read when torch is first imported. By default OpenMP threads spin while they wait: on a machine busy with
# something else, tiny products then take milliseconds each and the suite ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# TIDEKV_CPU=avx2 runs the suite as on a smaller CPU: torch and the libraries below it are held back too.
limit_libraries()


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The folder of the real embedded model, fetched on first use by the same code as for a user.

    It lies in the user's cache folder (or ``$TIDEKV_CACHE``), so only the first run on a machine fetches it.
    """
    from tidekv_llm.models.embedded import ensure_embedded

    return ensure_embedded()


@pytest.fixture
def one_token_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No drafts, for models whose logits follow a script call by call."""
    monkeypatch.setattr("tidekv_llm.options.DEFAULT_DRAFTS", 0)
    monkeypatch.setattr("tidekv_llm.service.requests.DEFAULT_DRAFTS", 0)
