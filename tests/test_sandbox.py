"""The child process for strangers' files: few rights, and no life of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidekv_llm import sandbox

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"memory_bytes": 1 << 30, "cpu_seconds": 20}


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        (tmp_path / "child_for_test.py").write_text(
            f"from tidekv_llm import sandbox\nrequest = sandbox.enter()\n{body}\n"
        )
        return "child_for_test"

    return write


def test_one_request_one_answer(module):
    child = module("print(request['word'] * 2, end='')")
    assert sandbox.run(child, {"word": "aé"}, memory_bytes=1 << 30, seconds=30) == "aéaé".encode()


@pytest.mark.parametrize("body", ["raise SystemExit(3)", "import time; time.sleep(600)", "while True: pass"])
def test_a_child_that_fails_or_hangs_gives_nothing(module, body):
    assert sandbox.run(module(body), {}, memory_bytes=1 << 30, seconds=2) is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_memory_files_and_secrets_are_out_of_reach(module, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    body = f"""
import os
try: bytearray(2 << 30); print('memory')
except MemoryError: pass
try:
    with open({str(tmp_path / "made")!r}, 'w') as file: file.write('x')
    print('file')
except OSError: pass
print(os.environ.get('HF_TOKEN'), end='')
"""
    assert sandbox.run(module(body), {}, memory_bytes=1 << 30, seconds=30) == b"None"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_the_child_ends_when_its_parent_is_killed(module, tmp_path):
    child = module("import time; print('up', flush=True); time.sleep(600)")
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
            f"from tidekv_llm import sandbox\nprocess = sandbox.start({child!r}, {{}}, **{LIMITS!r})\n"
            "process.stdout.readline(); print(process.pid, flush=True); process.wait()",
        ],
        stdout=subprocess.PIPE,
    )
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_stopping_leaves_no_process_and_no_open_pipe(module):
    process = sandbox.start(module("import time; time.sleep(600)"), {}, **LIMITS)
    sandbox.stop(process)
    assert process.poll() is not None
    assert process.stdin.closed and process.stdout.closed
    assert not hasattr(os, "kill") or not _runs(process.pid)
