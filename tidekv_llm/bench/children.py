"""Run measurements in fresh processes.

A job is the name of a function ``module:function`` of this package and its JSON arguments. The child prints one
line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tidekv_llm.errors import TideKVError

PACKAGE = "tidekv_llm.bench"
_MARK, _REFUSED = "tidekv-result ", "tidekv-refused "


class ChildFailed(TideKVError):
    """A measurement's process ended with an error; the message is its last line.

    Attributes:
        refused: whether it was one of our own errors about what was asked for, not a lack of memory or a crash.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def run_job(function: str, arguments: Mapping[str, Any], *, timeout_seconds: float = 3600) -> dict[str, Any]:
    """Call ``function`` (``module:name`` inside this package) in a fresh process.

    Raises:
        ChildFailed: the process failed or took too long.
    """
    command = [sys.executable, "-m", f"{PACKAGE}.children", function, json.dumps(dict(arguments))]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ChildFailed(f"{function} took more than {timeout_seconds:.0f} s") from error
    refusals = [line for line in done.stdout.splitlines() if line.startswith(_REFUSED)]
    if refusals:
        raise ChildFailed(json.loads(refusals[-1].removeprefix(_REFUSED)), refused=True)
    results = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not results:
        lines = done.stderr.strip().splitlines()
        reason = "gave no result" if done.returncode == 0 else f"exit code {done.returncode}"
        raise ChildFailed(f"{function}: {reason}{f' ({lines[-1]})' if lines else ''}")
    result: dict[str, Any] = json.loads(results[-1].removeprefix(_MARK))
    return result


def echo(value: int) -> dict[str, int]:
    """A job that costs nothing, to test the way there and back."""
    print("something else on standard output")
    return {"value": value}


def main(arguments: Sequence[str]) -> int:
    """The child's side; returns the exit code."""
    module, name = arguments[0].split(":")
    function = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    try:
        result = function(**json.loads(arguments[1]))
    except TideKVError as error:
        print(_REFUSED + json.dumps(str(error)))
        return 1
    print(_MARK + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
