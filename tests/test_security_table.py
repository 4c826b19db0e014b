"""SECURITY.md names a test for every defence, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "`tests/" in line]


def test_every_row_of_the_tables_is_a_threat_a_defence_and_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith(("| threat", "| ---"))]
    assert len(rows) == len(ROWS) > 30
    assert all(len(row) == 3 and all(row) for row in ROWS)
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_named_test_exists(row: list[str]) -> None:
    named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[2])
    assert named is not None, row[2]
    tree = ast.parse((ROOT / named[1]).read_text(encoding="utf-8"))
    assert named[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
