"""The tiny model of the integrations' tests."""

from __future__ import annotations

import pytest

from tests.integrations.tiny import save_tiny_chat


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("models") / "tiny"))
