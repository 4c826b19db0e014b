"""Fixtures that more than one test folder uses."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The folder of the real embedded model, fetched on first use by the same code as for a user.

    It lies in the user's cache folder (or ``$TIDEKV_CACHE``), so only the first run on a machine fetches it.
    """
    from tidekv_llm.models.embedded import ensure_embedded

    return ensure_embedded()
