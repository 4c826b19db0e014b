"""Models for the integrations' tests, and three ways to call one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.frameworks import FRAMEWORKS, Framework
from tests.integrations.tiny import save_tiny_chat


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The async tests of langchain-tests carry no mark."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and inspect.iscoroutinefunction(getattr(item, "function", None)):
            item.add_marker(pytest.mark.asyncio)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    return str(save_tiny_chat(tmp_path_factory.mktemp("models") / "base", template=False))


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def framework(request: pytest.FixtureRequest) -> Iterator[Framework]:
    yield request.param
    from tidekv_llm.integration import unload_unused

    unload_unused()
