"""Visits, their isolation and their end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apps.support import MODEL, entry, turn
from tidekv_apps.jobs import Job
from tidekv_apps.registry import Registry
from tidekv_apps.settings import AskSettings, Limits
from tidekv_apps.storage import Storage
from tidekv_apps.visits import VisitClosedError
from tidekv_llm.errors import BusyError, DocumentError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def registry(folder: Path, clock: Clock | None = None, **limits: object) -> Registry:
    return Registry(folder, Limits(**limits), lambda: AskSettings(model=MODEL), Storage(Limits()), clock or Clock())  # type: ignore[arg-type]


class FakeReader:
    def __init__(self, size: int) -> None:
        self.store_bytes, self.closed = size, False

    def close(self) -> None:
        self.closed = True


def test_two_sessions_share_nothing(tmp_path: Path) -> None:
    all_visits = registry(tmp_path)
    one, two = all_visits.get("a", "owner-a"), all_visits.get("b", "owner-b")
    one.entries.append(entry("secret.pdf"))
    one.turns.append(turn())
    assert two.entries == [] and two.turns == [] and two.reader is None
    assert one.folder != two.folder
    with pytest.raises(DocumentError, match="no longer here"):
        two.entry(one.entries[0].key)


def test_a_session_id_without_its_browsers_secret_opens_nothing(tmp_path: Path) -> None:
    all_visits = registry(tmp_path)
    mine = all_visits.get("a", "owner-a")
    for thief in ("", "owner-b"):
        with pytest.raises(VisitClosedError, match="another browser"):
            all_visits.get("a", thief)
        all_visits.close("a", thief)
    assert not mine.closed
    all_visits.close("a", "owner-a")
    assert mine.closed


def test_closing_frees_documents_store_and_files(tmp_path: Path) -> None:
    all_visits = registry(tmp_path)
    visit = all_visits.get("a", "x")
    (visit.folder / "copy").write_bytes(b"text")
    reader, job = FakeReader(10), Job()
    visit.entries, visit.turns, visit.job = [entry("a.pdf")], [turn()], job
    visit.reader = reader  # type: ignore[assignment]
    all_visits.close("a", "x")
    assert reader.closed and job.cancel.is_set()
    assert visit.entries == [] and visit.turns == []
    assert not visit.folder.exists()
    assert len(all_visits) == 0


def test_idle_sessions_end_and_used_or_busy_ones_stay(tmp_path: Path) -> None:
    clock = Clock()
    all_visits = registry(tmp_path, clock, idle_seconds=100)
    idle, used, busy = (all_visits.get(key, "x") for key in "abc")
    busy.job = Job()
    clock.now = 90
    all_visits.get("b", "x")
    clock.now = 150
    assert all_visits.sweep() == 1
    assert (idle.closed, used.closed, busy.closed) == (True, False, False)
    busy.job.finished.set()
    clock.now = 400
    assert all_visits.sweep() == 2


def test_stores_beyond_the_limit_go_least_recently_used_first(tmp_path: Path) -> None:
    all_visits = registry(tmp_path, store_bytes=25)
    visits = [all_visits.get(key, "x") for key in "abc"]
    readers = [FakeReader(10) for _ in visits]
    for visit, reader in zip(visits, readers, strict=True):
        visit.reader = reader  # type: ignore[assignment]
    all_visits.get("a", "x")
    all_visits.trim_stores()
    assert [reader.closed for reader in readers] == [False, True, False]


def test_an_empty_visit_makes_room_for_a_new_one_and_one_that_holds_something_never(tmp_path: Path) -> None:
    all_visits = registry(tmp_path, visits=2)
    first, second = all_visits.get("a", "x", "home"), all_visits.get("b", "y", "work")
    second.entries.append(entry("precious.pdf"))
    third = all_visits.get("c", "z", "train")
    assert first.closed and not second.closed
    third.job = Job()  # holds no document, but something runs
    with pytest.raises(BusyError, match="too many people"):
        all_visits.get("d", "w", "ship")
    assert not second.closed and not third.closed


def test_one_browser_and_one_address_have_shares_of_their_own(tmp_path: Path) -> None:
    all_visits = registry(tmp_path, visits=10, visits_per_owner=2)
    for number in range(2):
        all_visits.get(f"a{number}", "x", "home").entries.append(entry("a.pdf"))
    with pytest.raises(BusyError, match="close one"):
        all_visits.get("a2", "x", "home")
    for number in range(3):
        all_visits.get(f"b{number}", f"y{number}", "home").entries.append(entry("b.pdf"))
    with pytest.raises(BusyError, match="your address"):
        all_visits.get("c", "z", "home")
    all_visits.get("c", "z", "work")
    assert len(all_visits) == 6


def test_an_event_belongs_to_the_owner_of_its_visit_and_ends_with_it(tmp_path: Path) -> None:
    all_visits = registry(tmp_path)
    all_visits.get("a", "x")
    all_visits.note_event("a", "e1")
    assert all_visits.owns_event("e1", "x") and not all_visits.owns_event("e1", "y")
    all_visits.close("a", "x")
    assert not all_visits.owns_event("e1", "x")


def test_session_folders_are_private(tmp_path: Path) -> None:
    visit = registry(tmp_path).get("a", "x")
    assert visit.folder.stat().st_mode & 0o777 == 0o700
