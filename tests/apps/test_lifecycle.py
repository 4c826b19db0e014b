"""However the app ends, users' documents do not stay on the disk."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apps.conftest import Running, environment, start_app, stop_app
from tests.apps.web import Caller, until

WORDS = b"The harbour master is Ida Holm."


def filled(folder: Path, model: Path) -> Running:
    """An app that holds a document of one user and an upload of another."""
    running = start_app(folder, "--model", str(model))
    Caller(running.url).add(("harbour.txt", WORDS))
    assert Caller(running.url).upload(("waiting.txt", WORDS)).status_code == 200
    return running


def documents(folder: Path) -> list[Path]:
    """Every file that holds the user's words."""
    return [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == WORDS]


def end(running: Running, number: signal.Signals) -> int:
    running.process.send_signal(number)
    return running.process.wait(120)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_after_a_signal_nothing_is_left(tiny_model_path: Path, tmp_path: Path, name: str) -> None:
    running = filled(tmp_path, tiny_model_path)
    number = signal.Signals[name]
    assert len(documents(tmp_path)) == 2
    assert end(running, number) == 128 + number
    assert documents(tmp_path) == [] and not list(tmp_path.glob("tidekv-app-*"))


def test_the_next_start_removes_what_a_killed_one_left_and_spares_the_living(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    killed = filled(tmp_path, tiny_model_path)
    end(killed, signal.SIGKILL)
    left = set(documents(tmp_path))
    assert len(left) == 2
    living = filled(tmp_path, tiny_model_path)
    kept = set(documents(tmp_path))
    assert not left & kept and len(kept) == 2
    third = start_app(tmp_path, "--model", str(tiny_model_path))
    try:
        assert set(documents(tmp_path)) == kept
    finally:
        stop_app(third)
        stop_app(living)
    assert documents(tmp_path) == [] and not list(tmp_path.glob("tidekv-app-*"))


def test_a_start_that_fails_leaves_no_folder(tiny_app: Running, tiny_model_path: Path, tmp_path: Path) -> None:
    port = tiny_app.url.rsplit(":")[-1]
    command = [sys.executable, "-m", "tidekv_llm.cli", "app", "--model", str(tiny_model_path), "--port", port]
    settings = {**environment(), "TMPDIR": str(tmp_path)}
    failed = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280)
    assert failed.returncode == 2 and "taken" in failed.stderr
    assert not list(tmp_path.glob("tidekv-app-*"))


def test_a_browser_that_leaves_takes_its_documents_along(tiny_app: Running) -> None:
    """The page's sign of life ends when its tab is closed."""
    folder, mine = tiny_app.log.parent, Caller(tiny_app.url)
    with mine.web.stream("GET", f"/gradio_api/heartbeat/{mine.session}") as life:
        assert life.status_code == 200
        mine.add(("harbour.txt", WORDS))
        assert len(documents(folder)) == 1
    assert until(lambda: documents(folder) == [])
    assert until(lambda: not list(folder.glob("tidekv-app-*/visits/*/*")))
