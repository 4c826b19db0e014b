"""A running app for the whole folder, and sessions without one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
APPS = str(ROOT / "apps")
if APPS not in sys.path:
    sys.path.insert(0, APPS)

pytest.importorskip("gradio", reason="the app needs the extra: pip install 'tidekv-llm[app]'")


@dataclass
class Running:
    """An app in a process of its own, as a user starts it."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    start_seconds: float

    @property
    def memory(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def rss(self) -> int:
        children = self.memory.children(recursive=True)
        total = self.memory.memory_info().rss
        for child in children:
            with contextlib.suppress(psutil.Error):
                total += child.memory_info().rss
        return total

    def alive(self) -> bool:
        return self.process.poll() is None


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), APPS)), "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_app(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Running:
    """``tidekv app`` with these arguments; returns once it says where it is."""
    port, log, begin = free_port(), folder / "app.log", time.monotonic()
    command = [sys.executable, "-m", "tidekv_llm.cli", "app", "--port", str(port), *arguments]
    settings = {**environment(), "TMPDIR": str(folder), **(env or {})}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=settings, text=True, cwd=ROOT)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = re.search(r"at (http://\S+?)/? \(", log.read_text())
        if found:
            return Running(found[1], process, log, time.monotonic() - begin)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"the app did not start: {log.read_text()[-2000:]}")


def stop_app(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    try:
        running.process.wait(20)
    except subprocess.TimeoutExpired:
        running.process.kill()
        running.process.wait()


@pytest.fixture(scope="session")
def app(embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_app(tmp_path_factory.mktemp("app"))
    yield running
    stop_app(running)


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """``$TIDEKV_SCREENSHOTS``, or ``.screenshots`` in the repository, which git ignores."""
    folder = Path(os.environ.get("TIDEKV_SCREENSHOTS", ROOT / ".screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    folder = tmp_path / "uploads"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def chromium() -> str:
    pytest.importorskip("playwright", reason="browser tests need pip install playwright")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("browser tests need Debian's chromium: apt-get install chromium")
    return found
