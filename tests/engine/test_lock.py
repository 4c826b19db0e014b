"""The fair lock."""

from __future__ import annotations

import threading
import time

import pytest

from tidekv_llm.errors import BusyError, Cancelled
from tidekv_llm.lock import FairLock


def test_the_lock_is_handed_over_in_the_order_of_asking() -> None:
    lock, order, threads = FairLock(), [], []

    def work(number: int) -> None:
        with lock.hold():
            order.append(number)

    with lock.hold():
        for number in range(8):
            thread = threading.Thread(target=work, args=(number,))
            threads.append(thread)
            thread.start()
            while lock.waiting < number + 2:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    assert lock.waiting == 0


def test_only_one_holds_it_at_a_time() -> None:
    lock, inside, highest = FairLock(), [0], [0]

    def work() -> None:
        for _ in range(20):
            with lock.hold():
                inside[0] += 1
                highest[0] = max(highest[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert highest == [1]


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    lock, cancel = FairLock(), threading.Event()
    cancel.set()
    with lock.hold():
        with pytest.raises(Cancelled), lock.hold(cancel):
            pass
        assert lock.waiting == 1
    with lock.hold():
        pass
    assert lock.waiting == 0


def test_an_error_inside_gives_it_back() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock.hold():
        raise ZeroDivisionError
    assert lock.waiting == 0


def test_places_taken_before_are_served_in_their_order_and_told() -> None:
    lock, order, threads = FairLock(), [], []
    tickets = [lock.join() for _ in range(4)]
    places: dict[int, list[int]] = {number: [] for number in range(4)}

    def work(number: int) -> None:
        with lock.hold(ticket=tickets[number], on_place=places[number].append):
            order.append(number)

    for number in (3, 2, 1):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        while not places[number]:
            time.sleep(0.001)
    work(0)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
    assert [places[number][0] for number in range(4) if places[number]] == [1, 2, 3]
    assert all(seen == sorted(seen, reverse=True) for seen in places.values())
    assert lock.waiting == 0


def test_a_full_queue_refuses_and_a_place_left_is_free_again() -> None:
    lock, cancel = FairLock(most_waiting=2), threading.Event()
    tickets = [lock.join() for _ in range(3)]
    with pytest.raises(BusyError, match="3 requests are waiting already"):
        lock.join()
    cancel.set()
    with pytest.raises(Cancelled), lock.hold(cancel, ticket=tickets[2]):
        raise AssertionError("a stopped one ran")
    lock.join()
