"""The queue: one job at a time, in order, each can be stopped."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.apps.support import make_visit
from tidekv_apps.jobs import Job
from tidekv_llm.errors import BusyError, Cancelled
from tidekv_llm.lock import FairLock


def test_a_waiting_job_tells_its_place(tmp_path: Path) -> None:
    line, first, second = FairLock(), Job(), Job()
    with line.hold(), pytest.raises(Cancelled):
        first.ticket, second.ticket = line.join(), line.join()

        def seen(place: int) -> None:
            second.wait_behind(place)
            second.cancel.set()

        with line.hold(second.cancel, ticket=second.ticket, on_place=seen):
            raise AssertionError("a stopped job ran")
    assert (second.live.stage, second.live.detail) == ("Waiting", "2 before you in the queue")


def test_a_storm_of_questions_and_stops_runs_one_job_at_a_time(tmp_path: Path) -> None:
    line, visit, inside = FairLock(100), make_visit(tmp_path), []
    overlap = threading.Event()

    def work(job: Job) -> None:
        try:
            with line.hold(job.cancel, ticket=job.ticket, on_place=job.wait_behind):
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
        job.ticket = line.join()
        threads.append(threading.Thread(target=work, args=(job,)))
        threads[-1].start()
        visit.stop()
    for thread in threads:
        thread.join()
    assert not overlap.is_set()
    assert line.waiting == 0


def test_a_second_question_waits_until_the_first_is_stopped(tmp_path: Path) -> None:
    visit, first = make_visit(tmp_path), Job()
    visit.begin(first)
    with pytest.raises(BusyError, match="stop it"):
        visit.begin(Job())
    visit.stop()
    visit.begin(Job())
