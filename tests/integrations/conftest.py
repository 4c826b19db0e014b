"""Models for the integrations' tests, and three ways to call one."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from tests.integrations.frameworks import FRAMEWORKS, Framework
from tests.integrations.tiny import save_tiny_chat


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests: the async ones of langchain-tests carry no mark that a plugin would heed."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    return str(save_tiny_chat(tmp_path_factory.mktemp("models") / "base", template=False))


@pytest.fixture(params=FRAMEWORKS, ids=lambda framework: framework.name)
def framework(request: pytest.FixtureRequest) -> Framework:
    return request.param
