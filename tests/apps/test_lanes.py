"""Who reads next: short files do not wait for slow ones, and nobody takes everybody's time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tidekv_apps.lanes import QUICK_SECONDS, WINDOW_SECONDS, Lane, ReadingLanes
from tidekv_apps.settings import Limits
from tidekv_llm.errors import Cancelled, DocumentError, DocumentTimeoutError

NEVER = threading.Event()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A file that is never read within the quick lane's seconds, and then for as long as the test wants."""

    def __init__(self) -> None:
        self.in_slow_lane, self.done = threading.Event(), threading.Event()

    def __call__(self, seconds: float) -> str:
        if seconds <= QUICK_SECONDS:
            raise DocumentTimeoutError("not within its seconds")
        self.in_slow_lane.set()
        assert self.done.wait(60)
        return "slow"


def test_a_short_file_is_read_while_slow_ones_hold_every_slow_place() -> None:
    lanes, slow = ReadingLanes(Limits()), [Slow() for _ in range(6)]
    threads = [
        threading.Thread(target=lanes.read, args=(f"owner-{at}", 160_000, NEVER, file)) for at, file in enumerate(slow)
    ]
    for thread in threads:
        thread.start()
    assert slow[0].in_slow_lane.wait(60) or True
    assert lanes.read("short", 100, NEVER, lambda seconds: "short") == "short"
    assert not any(file.done.is_set() for file in slow)
    for file in slow:
        file.done.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def order_of(lane: Lane, waiting: list[tuple[str, float, int]]) -> list[str]:
    """In which order those get their turn who all wait for one place."""
    order: list[str] = []
    let_in = threading.Event()

    def hold() -> None:
        with lane.turn(-1, 0, NEVER):
            inside.set()
            let_in.wait(60)

    def wait(name: str, used: float, size: int) -> None:
        with lane.turn(used, size, NEVER):
            order.append(name)

    inside = threading.Event()
    threads = [threading.Thread(target=hold)]
    threads[0].start()
    assert inside.wait(60)
    for one in waiting:
        threads.append(threading.Thread(target=wait, args=one))
        threads[-1].start()
    while len(lane._waiting) < len(waiting):
        pass
    let_in.set()
    for thread in threads:
        thread.join(60)
    return order


def test_who_used_least_comes_first_then_the_smaller_file_then_who_came_first() -> None:
    waiting = [("greedy", 30.0, 1), ("large", 0.0, 900), ("small", 0.0, 10), ("small too", 0.0, 10)]
    assert order_of(Lane(1), waiting) == ["small", "small too", "large", "greedy"]


def reading(clock: Clock, seconds: float) -> Callable[[float], str]:
    def attempt(most: float) -> str:
        clock.now += min(seconds, most)
        if seconds > most:
            raise DocumentTimeoutError("not within its seconds")
        return "read"

    return attempt


def test_an_owner_has_only_so_many_seconds_within_ten_minutes() -> None:
    clock = Clock()
    lanes = ReadingLanes(Limits(parse_seconds=60, reading_seconds=100), clock)
    assert lanes.read("ida", 1, NEVER, reading(clock, 50)) == "read"
    assert lanes.spent("ida") == 50 + QUICK_SECONDS
    with pytest.raises(DocumentTimeoutError):
        lanes.read("ida", 1, NEVER, reading(clock, 50))
    with pytest.raises(DocumentError, match="took 100 s within 10 minutes; wait"):
        lanes.read("ida", 1, NEVER, reading(clock, 1))
    assert lanes.read("otto", 1, NEVER, reading(clock, 1)) == "read"
    clock.now += WINDOW_SECONDS + 1
    assert lanes.read("ida", 1, NEVER, reading(clock, 1)) == "read"


def test_a_file_that_takes_too_long_fails_and_leaves_its_place() -> None:
    clock = Clock()
    lanes = ReadingLanes(Limits(parse_seconds=20), clock)
    for _ in range(5):
        with pytest.raises(DocumentTimeoutError):
            lanes.read("ida", 1, NEVER, reading(clock, 21))
        clock.now += WINDOW_SECONDS + 1
    assert lanes.read("ida", 1, NEVER, reading(clock, 19)) == "read"


def test_waiting_for_a_place_ends_with_its_job() -> None:
    lane, stopped = Lane(1), threading.Event()
    with lane.turn(0, 0, NEVER):
        stopped.set()
        with pytest.raises(Cancelled), lane.turn(0, 0, stopped):
            raise AssertionError("a stopped file was read")
    with lane.turn(0, 0, NEVER):
        pass
