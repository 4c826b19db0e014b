"""Uploads are counted as they arrive, bounded in every direction, and leave nothing when they break off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.apps.conftest import Running, start_limited, stop_app
from tests.apps.web import API, Caller, Line, until, uploaded

MEGABYTE = 1 << 20
LIMITS = {
    "files": 3,
    "uploads": 8,
    "file_bytes": 2 * MEGABYTE,
    "visit_bytes": 2 * MEGABYTE,
    "upload_folder_bytes": 3 * MEGABYTE,
    "upload_seconds": 600.0,
}


@pytest.fixture(scope="module")
def small(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_limited(tmp_path_factory.mktemp("small"), tiny_model_path, limits=LIMITS)
    yield running
    stop_app(running)


@pytest.fixture(autouse=True)
def nothing_stays(small: Running) -> Iterator[None]:
    """Every test adds what it uploaded, or breaks it off."""
    yield
    assert until(lambda: uploaded(small.log.parent) == [])


def on_disk(app: Running) -> int:
    return sum(path.stat().st_size for path in app.log.parent.glob("tidekv-app-*/uploads/*/*"))


def add_all(caller: Caller, names: list[str]) -> None:
    """Take uploads out of the folder."""
    for name in names:
        caller.call("add_documents", [{"path": name, "meta": {"_type": "gradio.FileData"}}], "")
        caller.call("clear")


def test_what_an_upload_answers_is_no_path_of_this_machine(small: Running) -> None:
    mine = Caller(small.url)
    answer = mine.upload(("../../etc/harbour.txt", b"text"))
    (name,) = answer.json()
    assert name.endswith("/harbour.txt") and not name.startswith("/") and ".." not in name
    assert str(small.log.parent) not in answer.text and "tidekv-app-" not in answer.text
    add_all(mine, [name])


def test_chunked_bodies_count(small: Running) -> None:
    """No length is told: the bytes are counted as they come, and the file goes when they are too many."""
    mine, line = Caller(small.url), Line(small.url)
    line.begin_upload(mine, "a.txt", b"x" * MEGABYTE)
    with suppress(ConnectionError):
        for _ in range(20):
            line.chunk(b"x" * (MEGABYTE // 2))
    assert line.status() in (0, 413)
    assert until(lambda: on_disk(small) == 0)
    line.close()


def test_uploads_at_the_same_time_are_added_up(small: Running) -> None:
    """Two of 1.8 MB, 3 MB for all: each alone would fit."""
    one, two = Caller(small.url), Caller(small.url)
    first = Line(small.url)
    first.begin_upload(one, "a.txt", b"x" * int(1.8 * MEGABYTE))
    assert until(lambda: on_disk(small) > 1.5 * MEGABYTE)
    refused = two.upload(("b.txt", b"y" * int(1.8 * MEGABYTE)))
    assert refused.status_code == 507 and "full" in refused.json()["error"]
    assert first.end_upload() == 200  # the one that was there first is not disturbed
    add_all(one, json.loads(first.body()))
    later = two.upload(("b.txt", b"y" * int(1.8 * MEGABYTE)))
    assert later.status_code == 200
    add_all(two, later.json())
    first.close()


def test_a_broken_off_upload_leaves_nothing(small: Running) -> None:
    mine = Caller(small.url)
    for _ in range(10):  # more than may wait for one browser
        line = Line(small.url)
        line.begin_upload(mine, "a.txt", b"x" * 1000)
        line.close()
    assert until(lambda: on_disk(small) == 0)
    names = mine.upload(("a.txt", b"whole")).json()
    add_all(mine, names)


def test_a_body_that_ends_too_early_is_refused_as_a_whole(small: Running) -> None:
    mine = Caller(small.url)
    for body in (
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\ntext',
        b"--b\r\nContent",
        b"",
        b"no form at all",
    ):
        headers = {"content-type": "multipart/form-data; boundary=b"}
        assert mine.web.post(f"{API}/upload", content=body, headers=headers).status_code == 400
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary=" + "b" * 5000):
        assert mine.web.post(f"{API}/upload", content=b"x", headers={"content-type": kind}).status_code == 400


def test_the_number_of_files_is_bounded_for_each_browser_and_for_one_address(small: Running) -> None:
    mine, other = Caller(small.url), Caller(small.url)
    many = mine.upload(*((f"{number}.txt", b"x") for number in range(100)))
    assert many.status_code in (429, 507) and on_disk(small) == 0
    names = [name for number in range(4) for name in mine.upload((f"{number}.txt", b"x")).json()]
    assert other.upload(("a.txt", b"x")).status_code == 507  # half of all files come from this address
    add_all(mine, names)
    later = other.upload(("a.txt", b"x"))
    assert later.status_code == 200
    add_all(other, later.json())


def test_fields_that_are_no_files_are_stored_nowhere(small: Running) -> None:
    mine = Caller(small.url)
    answer = mine.web.post(f"{API}/upload", data={"files": "x" * 1000}, files=[("other", ("a.txt", b"x" * 1000))])
    assert answer.status_code == 200 and answer.json() == [] and on_disk(small) == 0


@pytest.mark.parametrize("name", ["\N{GRINNING FACE}" * 300 + ".txt", ".", "..", "", "a\nb.txt", "C:\\x\\y.txt"])
def test_any_name_is_taken_and_made_safe(small: Running, name: str) -> None:
    mine = Caller(small.url)
    sent = mine.upload((name or " ", b"The harbour master is Ida Holm."))
    assert sent.status_code == 200
    add_all(mine, sent.json())


def test_two_browsers_with_the_same_file_do_not_take_it_from_each_other(small: Running) -> None:
    one, two = Caller(small.url), Caller(small.url)
    first, second = (caller.upload(("same.txt", b"same text")).json() for caller in (one, two))
    assert first != second
    add_all(one, first)
    named = [{"path": second[0], "meta": {"_type": "gradio.FileData"}}]
    assert two.call("add_documents", named, "")["documents"][0]["state"] == "ready"


def test_adding_a_file_leaves_no_empty_file_and_no_empty_folder(small: Running) -> None:
    mine = Caller(small.url)
    for number in range(3):
        mine.add((f"{number}.txt", b"text %d" % number))
    assert until(lambda: uploaded(small.log.parent) == [])


def test_what_nobody_adds_goes_after_a_while(tiny_model_path: Path, tmp_path: Path) -> None:
    limits = {"upload_seconds": 1.0, "idle_seconds": 1.0, "uploads": 2}
    running = start_limited(tmp_path, tiny_model_path, limits=limits)
    try:
        mine = Caller(running.url)
        assert mine.upload(("a.txt", b"x")).status_code == 200
        assert until(lambda: uploaded(tmp_path) == [])
        assert until(lambda: mine.upload(("b.txt", b"x")).status_code == 200)
        line = Line(running.url)
        line.begin_upload(mine, "slow.txt", b"x")  # and then nothing
        assert until(lambda: uploaded(tmp_path) == [])
        line.close()
    finally:
        stop_app(running)
