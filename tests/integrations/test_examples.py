"""The examples run, stay short, and say what they are meant to say."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("langchain_chat_stream", "langchain_stuff_pdf", "llama_index_async", "llama_index_query_pdf")

pytestmark = pytest.mark.usefixtures("embedded_model_path")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()) < 40


# How many times likelier than the second best the least certain token was, in float32 and in bfloat16. The whole
# sentence up to the answer: London 15.2 and 15.6, Tokyo 12.5 and 12.2, Athens 12.7 and 12.2. The name alone, since
# "The answer is: Tobias Renn" is as good: 29.1 and 29.7.


def test_langchain_chat_stream(capsys: pytest.CaptureFixture[str]) -> None:
    _load("langchain_chat_stream").main()
    assert "London" in capsys.readouterr().out


def test_llama_index_async(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(_load("llama_index_async").main())
    out = capsys.readouterr().out
    assert "Tokyo" in out
    assert "Athens" in out


@pytest.mark.parametrize("name", ["langchain_stuff_pdf", "llama_index_query_pdf"])
def test_whole_pdf(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _load(name).main()
    out = capsys.readouterr().out
    assert "Tobias Renn" in out
    assert "p. 6 (verified)" in out
