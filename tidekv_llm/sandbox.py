"""A child process for a stranger's file: little memory and time, no files, no secrets, and gone when its parent is.

The parent calls :func:`start` (or :func:`run` for one answer), the child :func:`enter`. The request goes through the
child's standard input, which stays open as long as the parent lives: command lines are readable by other users, and
an input that ends tells the child that nobody waits for it any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidekv_llm.errors import DocumentError

_KEPT_VARIABLES = (
    "PATH",
    "SYSTEMROOT",
    "SystemRoot",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "TMPDIR",
    "TEMP",
)


def start(module: str, request: Mapping[str, Any], *, memory_bytes: int, cpu_seconds: int) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` and send it the request; the caller reads its output and ends it with :func:`stop`.

    Raises:
        DocumentError: the process cannot be started.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            close_fds=True,
        )
    except OSError as error:
        raise DocumentError(f"the process that reads files cannot be started ({error.strerror}); free memory") from None
    sent = {"memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds, "request": dict(request)}
    with contextlib.suppress(OSError):  # a child that died at once: whoever reads its output finds out
        assert process.stdin is not None
        process.stdin.write(json.dumps(sent).encode() + b"\n")
        process.stdin.flush()
    return process


def stop(process: subprocess.Popen[bytes]) -> int:
    """End the process if it has not ended, close its pipes, and give its exit code."""
    if process.poll() is None:
        process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return code


def run(module: str, request: Mapping[str, Any], *, memory_bytes: int, seconds: int) -> bytes | None:
    """The whole output of ``module`` for this request; None if it failed or took longer than ``seconds``."""
    process = start(module, request, memory_bytes=memory_bytes, cpu_seconds=seconds)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        answer = process.stdout.read()
        return answer if process.wait() == 0 else None
    finally:
        timer.cancel()
        stop(process)


def enter() -> dict[str, Any]:
    """In the child: take the request, and from here on live under its limits and no longer than the parent."""
    sent: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _limit(int(sent["memory_bytes"]), int(sent["cpu_seconds"]))
    request: dict[str, Any] = sent["request"]
    return request


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def _limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Address space, CPU time, no files, no core dump; where the platform has such limits."""
    try:
        import resource
    except ImportError:  # Windows: the deadline of the parent still holds
        return
    limits = {"RLIMIT_AS": memory_bytes, "RLIMIT_CPU": cpu_seconds, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):  # macOS refuses RLIMIT_AS
            resource.setrlimit(getattr(resource, name), (value, value))


def _environment() -> dict[str, str]:
    """What the child needs to find the same packages, and none of the caller's secrets (tokens, keys)."""
    package_root = str(Path(__file__).resolve().parents[1])
    search_path = [package_root, *(entry for entry in sys.path if entry and entry != package_root)]
    return {
        **{name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONSAFEPATH": "1",  # `-m` would put the current folder first: a stray pypdf.py there must not run
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8",
    }
