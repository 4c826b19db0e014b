"""Nothing of a prompt is left for the next one: budgets in one process are those of fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compress.one_process import last_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"kept_tokens": 60, "layer_budget": "pyramid", "head_budget": "ada"}, [200, 500]),
        ({"kept_tokens": 60, "layer_budget": "cake", "selector": "chunkkv"}, [500, 200]),
    ],
    ids=["pyramid-ada", "cake-chunkkv"],
)
def test_two_lengths_in_one_process_give_what_fresh_processes_give(
    options: dict[str, object], lengths: list[int]
) -> None:
    assert last_of(options, lengths) == _fresh_process(options, lengths[-1])


def _fresh_process(options: dict[str, object], length: int) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.compress.one_process", json.dumps(options), str(length)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result
