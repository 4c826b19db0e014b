"""The queue: one job at a time, in order, each can be stopped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.apps.support import make_visit
from tidekv_apps.jobs import BusyError, Job, JobQueue
from tidekv_llm.errors import Cancelled


def test_one_job_at_a_time_in_order_and_each_knows_its_place() -> None:
    line, inside, most, order = JobQueue(10), 0, 0, []
    jobs = [Job() for _ in range(4)]
    places: list[str] = []

    def run(number: int) -> None:
        nonlocal inside, most
        with line.turn(jobs[number]):
            inside += 1
            most = max(most, inside)
            order.append(number)
            time.sleep(0.05)
            inside -= 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for job in jobs:
        line.join(job)
    for thread in reversed(threads):
        thread.start()
    time.sleep(0.03)
    places = [job.live.detail for job in jobs]
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
    assert most == 1
    assert places[3] in ("3 before you in the queue", "2 before you in the queue")


def test_a_waiting_job_can_be_stopped_and_a_failing_one_frees_its_place() -> None:
    line = JobQueue(10)
    first, second, third = Job(), Job(), Job()
    for job in (first, second, third):
        line.join(job)
    second.cancel.set()
    with pytest.raises(RuntimeError, match="fails"), line.turn(first):
        with pytest.raises(Cancelled), line.turn(second):
            raise AssertionError("a stopped job ran")
        raise RuntimeError("fails")
    with line.turn(third):
        assert len(line) == 1
    assert len(line) == 0


def test_a_full_queue_refuses() -> None:
    line = JobQueue(2)
    for _ in range(3):
        line.join(Job())
    with pytest.raises(BusyError, match="waiting already"):
        line.join(Job())


def test_a_storm_of_questions_and_stops_runs_one_job_at_a_time(tmp_path: Path) -> None:
    line, visit, inside = JobQueue(100), make_visit(tmp_path), []
    overlap = threading.Event()

    def work(job: Job) -> None:
        try:
            with line.turn(job):
                if inside:
                    overlap.set()
                inside.append(job)
                job.cancel.wait(0.02)
                inside.remove(job)
        except Cancelled:
            pass
        finally:
            job.finished.set()

    threads = []
    for _ in range(30):
        job = Job()
        visit.begin(job)
        line.join(job)
        threads.append(threading.Thread(target=work, args=(job,)))
        threads[-1].start()
        visit.stop()
    for thread in threads:
        thread.join()
    assert not overlap.is_set()
    assert len(line) == 0


def test_a_second_question_waits_until_the_first_is_stopped(tmp_path: Path) -> None:
    visit, first = make_visit(tmp_path), Job()
    visit.begin(first)
    with pytest.raises(BusyError, match="stop it"):
        visit.begin(Job())
    visit.stop()
    visit.begin(Job())
