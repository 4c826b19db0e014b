"""Under load everybody gets the answer of their own document, and afterwards nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.conftest import Running, start_app, stop_app
from tests.apps.load import Report, is_idle, press, references
from tests.apps.web import stored, until

MEMORY_BYTES = 30 << 20


@pytest.fixture
def pressed(tiny_model_path: Path, tmp_path: Path) -> Iterator[Running]:
    running = start_app(tmp_path, "--model", str(tiny_model_path))
    yield running
    stop_app(running)


def check(report: Report, running: Running) -> None:
    """Right answers only, and nothing left."""
    print("\n".join(report.lines()))
    folder = running.log.parent
    assert not report.wrong
    assert report.counts["answered"] > 0 and report.seconds["/health"]
    assert until(lambda: is_idle(running.url))
    assert until(lambda: stored(folder) == [])
    assert until(lambda: not list(folder.glob("tidekv-app-*/visits/*")))
    assert "Traceback" not in running.log.read_text()


def test_a_few_clients_for_a_moment(pressed: Running) -> None:
    check(press(pressed.url, references(pressed.url), clients=7, seconds=5), pressed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_clients_for_two_minutes(pressed: Running) -> None:
    seconds = float(os.environ.get("TIDEKV_LOAD_SECONDS", "120"))
    known = references(pressed.url)
    assert len(set(known.values())) > 1  # different documents have different answers
    press(pressed.url, known, clients=50, seconds=seconds / 10)  # threads, arenas and caches are there after this
    assert until(lambda: is_idle(pressed.url) and stored(pressed.log.parent) == [])
    before = pressed.rss()
    report = press(pressed.url, known, clients=50, seconds=seconds)
    check(report, pressed)
    grown = pressed.rss() - before
    print(f"memory: {before >> 20} MiB before, {grown / (1 << 20):+.1f} MiB after")
    assert until(lambda: pressed.rss() - before < MEMORY_BYTES)
