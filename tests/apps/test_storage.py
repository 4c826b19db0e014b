"""What is stored is counted, for a visit, an owner and all; what is removed is gone, from the disk and the count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apps.support import GARDEN, HARBOUR, MODEL, write
from tests.documents.pdf_writer import cyclic_tree
from tidekv_apps import ingest
from tidekv_apps.ingest import Ingest
from tidekv_apps.jobs import Job
from tidekv_apps.lanes import ReadingLanes
from tidekv_apps.settings import AskSettings, Limits
from tidekv_apps.storage import Storage
from tidekv_apps.visits import Visit
from tidekv_llm.errors import Cancelled, DocumentError

TEXT = b"The harbour master is Ida Holm. " * 32  # 1,024 bytes


class House:
    """Visits of several owners on one server."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.folder, self.limits = folder, Limits(**limits)  # type: ignore[arg-type]
        self.storage, self.lanes = Storage(self.limits), ReadingLanes(self.limits)
        self.uploads = folder / "uploads"
        self.uploads.mkdir()

    def visit(self, owner: str, name: str) -> Visit:
        (self.folder / name).mkdir()
        return Visit(owner, self.folder / name, AskSettings(model=MODEL), self.storage)

    def add(self, visit: Visit, name: str, data: bytes) -> None:
        task, job = Ingest(visit, self.uploads, self.limits, self.lanes), Job()
        task.read(task.admit([str(write(self.uploads, name, data))], job), job)


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def different(number: int) -> bytes:
    return f"{number:4}".encode() + TEXT[4:]


def test_a_new_conversation_deletes_the_files_and_their_count(tmp_path: Path) -> None:
    house = House(tmp_path)
    visit = house.visit("ida", "one")
    for turn in range(3):
        house.add(visit, "a.txt", different(turn))
        house.add(visit, "b.pdf", HARBOUR)
        visit.clear()
        assert on_disk(tmp_path) == 0
        assert house.storage.files.total == house.storage.texts.total == 0


def test_documents_that_were_put_aside_are_counted_and_go_with_the_conversation(tmp_path: Path) -> None:
    house = House(tmp_path, visit_bytes=2500)
    visit = house.visit("ida", "one")
    house.add(visit, "a.txt", TEXT)
    house.add(visit, "broken.pdf", cyclic_tree())
    assert [entry.name for entry in visit.parked] == ["a.txt"]
    with pytest.raises(DocumentError, match=r"2\.44 KiB; remove some first"):
        house.add(visit, "c.txt", different(1) + different(2))
    visit.clear()
    assert on_disk(visit.folder) == 0 == house.storage.files.total


def test_what_is_put_aside_twice_keeps_only_what_can_come_back(tmp_path: Path) -> None:
    house = House(tmp_path)
    visit = house.visit("ida", "one")
    for number in (1, 2):
        house.add(visit, f"{number}.txt", different(number))
        house.add(visit, "broken.pdf", cyclic_tree())
    assert [entry.name for entry in visit.parked] == ["2.txt"]
    kept = {entry.digest for entry in (*visit.entries, *visit.parked)}
    assert {file.name for file in visit.folder.iterdir()} == kept
    assert house.storage.files.total == on_disk(visit.folder)


def test_the_tabs_of_one_owner_are_counted_together(tmp_path: Path) -> None:
    house = House(tmp_path, owner_bytes=2048)
    one, two, other = house.visit("ida", "one"), house.visit("ida", "two"), house.visit("otto", "three")
    house.add(one, "a.txt", different(1))
    house.add(two, "b.txt", different(2))
    with pytest.raises(DocumentError, match=r"2\.00 KiB; close another conversation first"):
        house.add(two, "c.txt", different(3))
    house.add(other, "c.txt", different(3))
    one.close()
    house.add(two, "c.txt", different(3))
    assert house.storage.files.held("ida") == 2048


def test_everybodys_files_are_counted_together(tmp_path: Path) -> None:
    house = House(tmp_path, stored_bytes=2048)
    for number, owner in enumerate(("ida", "otto")):
        house.add(house.visit(owner, owner), "a.txt", different(number))
    with pytest.raises(DocumentError, match="no room for more files"):
        house.add(house.visit("carol", "carol"), "a.txt", TEXT)
    assert on_disk(tmp_path) == 2048


def test_the_text_of_files_is_counted_in_memory(tmp_path: Path) -> None:
    house = House(tmp_path, text_bytes=1500)
    visit = house.visit("ida", "one")
    house.add(visit, "a.txt", different(1))
    house.add(visit, "b.txt", different(2))
    (failed,), (kept,) = visit.entries, visit.parked
    assert failed.state == "failed" and "all texts" in failed.error and failed.document is None
    assert 1024 < house.storage.texts.total < 1500
    ingest.restore(visit)
    ingest.remove(visit, kept.key)
    assert house.storage.texts.total == 0


def test_a_removed_file_and_a_file_listed_twice_are_counted_once(tmp_path: Path) -> None:
    house = House(tmp_path)
    visit = house.visit("ida", "one")
    house.add(visit, "a.pdf", GARDEN)
    house.add(visit, "same.pdf", GARDEN)
    assert len(visit.entries) == 2 and house.storage.files.total == len(GARDEN) == on_disk(tmp_path)
    ingest.remove(visit, visit.entries[0].key)
    assert on_disk(tmp_path) == len(GARDEN)
    ingest.remove(visit, visit.entries[0].key)
    assert on_disk(tmp_path) == 0 == house.storage.files.total


def test_refused_files_are_deleted_at_once(tmp_path: Path) -> None:
    house = House(tmp_path, files=1)
    visit, job = house.visit("ida", "one"), Job()
    paths = [str(write(house.uploads, name, TEXT)) for name in ("a.txt", "b.txt")]
    with pytest.raises(DocumentError, match="takes 1 files"):
        Ingest(visit, house.uploads, house.limits, house.lanes).admit(paths, job)
    assert on_disk(tmp_path) == 0 == house.storage.files.total


def test_the_third_of_three_that_is_too_much_takes_the_first_two_along(tmp_path: Path) -> None:
    house = House(tmp_path, visit_bytes=2048)
    visit = house.visit("ida", "one")
    paths = [str(write(house.uploads, f"{number}.txt", different(number))) for number in range(3)]
    with pytest.raises(DocumentError, match="remove some first"):
        Ingest(visit, house.uploads, house.limits, house.lanes).admit(paths, Job())
    assert on_disk(tmp_path) == 0 == house.storage.files.total


def test_what_arrives_after_the_conversation_was_cleared_is_not_kept(tmp_path: Path) -> None:
    house = House(tmp_path)
    visit, job = house.visit("ida", "one"), Job()
    visit.reading = job
    visit.clear()
    with pytest.raises(Cancelled):
        Ingest(visit, house.uploads, house.limits, house.lanes).admit([str(write(house.uploads, "a.txt", TEXT))], job)
    assert on_disk(tmp_path) == 0 == house.storage.files.total


def test_the_same_path_twice_in_one_request_is_one_file(tmp_path: Path) -> None:
    house = House(tmp_path)
    visit, path = house.visit("ida", "one"), str(write(house.uploads, "a.txt", TEXT))
    entries = Ingest(visit, house.uploads, house.limits, house.lanes).admit([path, path], Job())
    assert [entry.name for entry in entries] == ["a.txt"]


def test_a_file_that_another_request_took_is_named_as_missing(tmp_path: Path) -> None:
    house = House(tmp_path)
    visit, path = house.visit("ida", "one"), write(house.uploads, "a.txt", TEXT)
    task = Ingest(visit, house.uploads, house.limits, house.lanes)
    task.admit([str(path)], Job())
    with pytest.raises(DocumentError, match="choose it again"):
        task.admit([str(path)], Job())
