"""Errors of the library are read in the app and in programs too: only the command line speaks of its options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidekv_llm.cli import main
from tidekv_llm.errors import ConfigError, EncryptedDocumentError, MemoryLimitError, TideKVError

ROOT = Path(__file__).parents[1]
# These rooms are the command line, or speak to whoever started it.
COMMAND_LINE = ("cli", "bench", "console", "doctor")
HINT = re.compile(r"command line|\(--[a-z]|\btidekv (ask|plan|sessions|bench|doctor)\b")


def messages(path: Path) -> Iterator[str]:
    """Every string of a module that is not documentation."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has_doc(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def _has_doc(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def test_no_hint_about_an_option_reaches_users_of_the_library() -> None:
    found = {}
    for path in (ROOT / "tidekv_llm").rglob("*.py"):
        room = path.relative_to(ROOT / "tidekv_llm").parts[0].removesuffix(".py")
        hints = [text for text in messages(path) if HINT.search(text)]
        if hints and room not in COMMAND_LINE:
            found[str(path)] = hints
    assert found == {}


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (EncryptedDocumentError("a.pdf is encrypted; give its password"), "password with --password"),
        (MemoryLimitError("tidekv needs 3.00 GiB"), "'tidekv plan' shows what would fit"),
        (ConfigError("chunk_size=0"), "chunk_size=0\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_command_line_adds_its_own_remedy(
    error: TideKVError, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr("tidekv_llm.cli.sessions._list", fail)
    assert main(["sessions", "list"]) != 0
    assert hint in capsys.readouterr().err
