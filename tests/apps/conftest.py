"""A running app for the whole folder, and sessions without one."""

from __future__ import annotations

import contextlib
import json
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

from tests.apps.web import Caller
from tests.integrations.tiny import save_tiny_chat
from tests.terminal import hears_signals

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
    return _start(folder, ["-m", "tidekv_llm.cli", "app", "--port", str(free_port()), *arguments], env)


def start_limited(folder: Path, model: Path, **options: object) -> Running:
    """The app on a tiny model, with limits and other options that have no argument."""
    chosen = {"model": str(model), "port": free_port(), **options}
    return _start(folder, ["-m", "tests.apps.serve", json.dumps(chosen)], None)


def start_driver(driver: str, folder: Path, model: Path, notes: Path, **options: object) -> Running:
    """The app with parts of it replaced, see ``watched.py`` and ``stuck.py``."""
    chosen = {"model": str(model), "port": free_port(), **options}
    return _start(folder, ["-m", f"tests.apps.{driver}", str(notes), json.dumps(chosen)], None)


def _start(folder: Path, arguments: list[str], env: dict[str, str] | None) -> Running:
    log, begin = folder / f"app-{len(list(folder.glob('*.log')))}.log", time.monotonic()
    command = [sys.executable, *arguments]
    settings = {**environment(), "TMPDIR": str(folder), **(env or {})}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=settings, text=True, cwd=ROOT, preexec_fn=hears_signals
        )
    deadline = time.monotonic() + 600
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
        running.process.wait(300)
    except subprocess.TimeoutExpired:
        running.process.kill()
        running.process.wait()


@pytest.fixture(scope="session")
def app(embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_app(tmp_path_factory.mktemp("app"))
    yield running
    stop_app(running)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that answers in a blink; one character is one token."""
    return save_tiny_chat(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="module")
def tiny_app(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An app of its own for a file of tests, with the usual limits."""
    running = start_app(tmp_path_factory.mktemp("tiny-app"), "--model", str(tiny_model_path))
    yield running
    stop_app(running)


@pytest.fixture(autouse=True)
def close_connections() -> Iterator[None]:
    yield
    Caller.close_all()


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
