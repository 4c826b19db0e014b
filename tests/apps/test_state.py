"""Sessions, their isolation and end; the queue."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.apps.support import MODEL, entry, make_session, turn
from tidekv_apps.settings import AskSettings, Limits
from tidekv_apps.state import Job, Registry, SessionClosedError
from tidekv_llm.errors import BusyError, Cancelled, ConfigError, DocumentError
from tidekv_llm.lock import FairLock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def registry(folder: Path, clock: Clock | None = None, **limits: object) -> Registry:
    return Registry(folder, Limits(**limits), lambda: AskSettings(model=MODEL), clock or Clock())  # type: ignore[arg-type]


class FakeReader:
    def __init__(self, size: int) -> None:
        self.store_bytes, self.closed = size, False

    def close(self) -> None:
        self.closed = True


def test_two_sessions_share_nothing(tmp_path: Path) -> None:
    all_sessions = registry(tmp_path)
    one, two = all_sessions.get("a", "owner-a"), all_sessions.get("b", "owner-b")
    one.entries.append(entry("secret.pdf"))
    one.turns.append(turn())
    assert two.entries == [] and two.turns == [] and two.reader is None
    assert one.folder != two.folder
    with pytest.raises(DocumentError, match="no longer here"):
        two.entry(one.entries[0].key)


def test_a_session_id_without_its_browsers_secret_opens_nothing(tmp_path: Path) -> None:
    all_sessions = registry(tmp_path)
    mine = all_sessions.get("a", "owner-a")
    for thief in ("", "owner-b"):
        with pytest.raises(SessionClosedError, match="another browser"):
            all_sessions.get("a", thief)
        all_sessions.close("a", thief)
    assert not mine.closed
    all_sessions.close("a", "owner-a")
    assert mine.closed


def test_closing_frees_documents_store_and_files(tmp_path: Path) -> None:
    all_sessions = registry(tmp_path)
    session = all_sessions.get("a", "x")
    (session.folder / "copy").write_bytes(b"text")
    reader, job = FakeReader(10), Job()
    session.entries, session.turns, session.job = [entry("a.pdf")], [turn()], job
    session.reader = reader  # type: ignore[assignment]
    all_sessions.close("a", "x")
    assert reader.closed and job.cancel.is_set()
    assert session.entries == [] and session.turns == []
    assert not session.folder.exists()
    assert len(all_sessions) == 0


def test_idle_sessions_end_and_used_or_busy_ones_stay(tmp_path: Path) -> None:
    clock = Clock()
    all_sessions = registry(tmp_path, clock, idle_seconds=100)
    idle, used, busy = (all_sessions.get(key, "x") for key in "abc")
    busy.job = Job()
    clock.now = 90
    all_sessions.get("b", "x")
    clock.now = 150
    assert all_sessions.sweep() == 1
    assert (idle.closed, used.closed, busy.closed) == (True, False, False)
    busy.job.finished.set()
    clock.now = 400
    assert all_sessions.sweep() == 2


def test_stores_beyond_the_limit_go_least_recently_used_first(tmp_path: Path) -> None:
    all_sessions = registry(tmp_path, store_bytes=25)
    sessions = [all_sessions.get(key, "x") for key in "abc"]
    readers = [FakeReader(10) for _ in sessions]
    for session, reader in zip(sessions, readers, strict=True):
        session.reader = reader  # type: ignore[assignment]
    all_sessions.get("a", "x")
    all_sessions.trim_stores()
    assert [reader.closed for reader in readers] == [False, True, False]


def test_too_many_sessions_close_an_idle_one_or_are_refused(tmp_path: Path) -> None:
    all_sessions = registry(tmp_path, sessions=2)
    first, second = all_sessions.get("a", "x"), all_sessions.get("b", "x")
    second.job = Job()
    third = all_sessions.get("c", "x")
    assert first.closed and not second.closed
    third.job = Job()
    with pytest.raises(BusyError, match="too many people"):
        all_sessions.get("d", "x")


def test_session_folders_are_private(tmp_path: Path) -> None:
    session = registry(tmp_path).get("a", "x")
    assert session.folder.stat().st_mode & 0o777 == 0o700


# --- whose turn it is -----------------------------------------------------------------------------------


def test_a_storm_of_questions_and_stops_runs_one_job_at_a_time(tmp_path: Path) -> None:
    line, session, inside = FairLock(100), make_session(tmp_path), []
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
        session.begin(job)
        job.ticket = line.join()
        threads.append(threading.Thread(target=work, args=(job,)))
        threads[-1].start()
        session.stop()
    for thread in threads:
        thread.join()
    assert not overlap.is_set()
    assert line.waiting == 0


def test_a_second_question_waits_until_the_first_is_stopped(tmp_path: Path) -> None:
    session, first = make_session(tmp_path), Job()
    session.begin(first)
    with pytest.raises(BusyError, match="stop it"):
        session.begin(Job())
    session.stop()
    session.begin(Job())


# --- settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept_tokens": 3}, "kept_tokens=3 must be at least"),
        ({"kept_tokens": "many"}, "kept_tokens='many' must be a number"),
        ({"kept_tokens": 99.5}, "whole number"),
        ({"selector": "x"}, "selector='x' is unknown"),
        ({"schedule": "x"}, "schedule='x' is unknown"),
        ({"chunk_size": "0"}, "chunk_size=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"model": "/etc"}, "not offered here"),
        ({"device": "cuda"}, "unknown setting 'device'"),
    ],
    ids=str,
)
def test_impossible_settings_are_named_and_change_nothing(changes: dict[str, object], message: str) -> None:
    settings = AskSettings(model=MODEL)
    with pytest.raises(ConfigError, match=message):
        settings.change((MODEL,), **changes)
    assert settings == AskSettings(model=MODEL)


def test_empty_optional_settings_are_none_and_numbers_come_as_text_too() -> None:
    changed = AskSettings(model=MODEL).change(
        (MODEL,), context_window="", seed="7", chunk_size="512", kept_tokens=300.0, retrieval=True
    )
    assert (changed.context_window, changed.seed, changed.chunk_size, changed.kept_tokens) == (None, 7, 512, 300)
    assert changed.prefill().chunk_size == 512


def test_the_loader_is_asked_for_nothing_but_what_the_operator_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trust_remote_code and no other option ever comes from a user."""
    from tidekv_apps.models import Models
    from tidekv_apps.settings import AppOptions
    from tidekv_llm.engine import TideKV

    seen = {}

    def fake(name: str, **options: object) -> object:
        seen.update(options, name=name)
        raise ConfigError("that was all")

    monkeypatch.setattr(TideKV, "from_pretrained", fake)
    with pytest.raises(ConfigError, match="that was all"):
        Models(AppOptions(models=(MODEL,))).load(MODEL)
    assert set(seen) == {"name", "device", "dtype", "context_window", "load_progress"}
