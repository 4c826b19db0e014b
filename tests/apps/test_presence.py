"""Nobody's question is computed for a client that is gone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.apps.conftest import start_driver, stop_app
from tests.apps.web import API, Caller, until
from tidekv_apps.presence import Presence

SHORT = b"The harbour master is Ida Holm."


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_event_is_gone_after_its_patience_and_not_while_somebody_listens() -> None:
    clock = Clock()
    presence = Presence(10, clock)
    gone = presence.watch("event", "session")
    clock.now = 10
    assert not gone()
    with presence.listening("session"):
        clock.now = 100
        assert not gone()
    clock.now = 110
    assert not gone()
    with presence.listening("event"), presence.listening("event"):
        pass
    clock.now = 121
    assert gone()


def test_a_client_that_connects_again_in_time_loses_nothing() -> None:
    clock = Clock()
    presence = Presence(10, clock)
    gone = presence.watch("event")
    for start in range(0, 100, 9):
        clock.now = start
        assert not gone()
        with presence.listening("event"):
            pass


def test_nothing_is_remembered_of_those_who_left_long_ago() -> None:
    clock = Clock()
    presence = Presence(10, clock)
    for number in range(1000):
        clock.now = number
        with presence.listening(str(number)):
            pass
    assert len(presence._left) <= 11 and not presence._listening


@pytest.mark.parametrize("leave", ["never asks for the result", "breaks the connection"])
def test_questions_of_clients_that_are_gone_make_way(tiny_model_path: Path, tmp_path: Path, leave: str) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    running = start_driver("stuck", tmp_path, tiny_model_path, notes, limits={"listener_seconds": 2.0})
    try:
        gone = [Caller(running.url) for _ in range(4)]
        for at, one in enumerate(gone):
            one.add(("a.txt", SHORT))
            event = one.begin("ask", f"slow {at}?").json()["event_id"]
            if leave == "breaks the connection":
                with one.web.stream("GET", f"{API}/call/ask/{event}") as stream:
                    assert stream.status_code == 200
        patient = Caller(running.url)
        patient.add(("a.txt", SHORT))
        answers: list[object] = []
        waiting = threading.Thread(target=lambda: answers.append(patient.call("ask", "quick?")))
        waiting.start()
        waiting.join(120)
        assert answers and answers[0]["state"] == "done"  # type: ignore[index]
        lines = notes.read_text().splitlines()
        begun = [line for line in lines if line.startswith("begun slow")]
        assert len(begun) == len([line for line in lines if line.startswith("cancelled slow")])
        assert until(lambda: patient.web.get("/health").json()["questions"] == 0)
    finally:
        stop_app(running)
