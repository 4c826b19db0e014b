"""Run measurements in fresh processes, in alternating order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tidekv_llm.bench.measure import Measurement


class ChildFailed(RuntimeError):
    """A measurement's process ended with an error; the message is its last line."""


def run_child(what: Measurement, *, timeout_seconds: float = 3600) -> dict[str, Any]:
    """Measure in a process of its own, so that no method inherits another's heap.

    Raises:
        ChildFailed: the process failed or took too long.
    """
    command = [sys.executable, "-m", "tidekv_llm.bench.children", json.dumps(asdict(what))]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ChildFailed(f"{what.method} took more than {timeout_seconds:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ChildFailed(f"{what.method}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def medians(runs: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """The median of each named figure."""
    return {name: float(median(run[name] for run in runs)) for name in names}


if __name__ == "__main__":
    from tidekv_llm.bench.measure import measure

    print(json.dumps(measure(Measurement(**json.loads(sys.argv[1])))))
