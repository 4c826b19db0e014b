"""The page under attack, over HTTP: paths, files, reading time and memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apps.conftest import Running, start_limited, stop_app
from tests.apps.web import Caller, stored, until
from tests.documents.pdf_writer import document, stream

SHORT = b"The harbour master is Ida Holm."
MEGABYTE = b"The keeper counts the ships and writes down the wind of the day. " * 16_000


# Little to send, and much to read: every page takes its six seconds.
SLOW_PDF = document([stream(b"BT /F1 1 Tf (a) Tj ET\n" * 1_500_000, compress=True) for _ in range(3)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked")


@pytest.fixture(scope="module")
def attacked(tiny_model_path: Path, folder: Path) -> Iterator[Running]:
    running = start_limited(folder, tiny_model_path, limits={"listener_seconds": 600.0, "visit_bytes": 1 << 20})
    yield running
    stop_app(running)


def named(name: object) -> dict[str, Any]:
    return {"path": name, "meta": {"_type": "gradio.FileData"}}


def test_two_users_add_the_same_file_at_once(attacked: Running) -> None:
    one, two = Caller(attacked.url), Caller(attacked.url)
    paths = [caller.upload(("same.txt", SHORT)).json() for caller in (one, two)]
    assert paths[0] != paths[1]
    for caller, (path,) in zip((one, two), paths, strict=True):
        added = caller.call("add_documents", [named(path)], "")
        assert [entry["state"] for entry in added["documents"]] == ["ready"]


def test_the_same_file_twice_in_one_request_is_listed_once(attacked: Running) -> None:
    mine = Caller(attacked.url)
    (path,) = mine.upload(("a.txt", SHORT)).json()
    added = mine.call("add_documents", [named(path), named(path)], "")
    assert [entry["state"] for entry in added["documents"]] == ["ready"]


def test_a_file_that_was_added_already_is_named_as_missing(attacked: Running) -> None:
    mine = Caller(attacked.url)
    (path,) = mine.upload(("a.txt", SHORT)).json()
    mine.call("add_documents", [named(path)], "")
    begun = mine.begin("add_documents", [named(path)], "")
    text = begun.text if begun.status_code != 200 else mine.result("add_documents", begun.json()["event_id"]).text
    assert "choose it again" in text


@pytest.mark.parametrize(
    "files",
    [
        [named("/etc/passwd")],
        ["/etc/passwd"],
        "/etc/passwd",
        [[named("/etc/passwd")]],
        [named(["/etc/passwd"])],
        [named(7)],
    ],
    ids=str,
)
def test_a_path_of_the_server_is_refused_in_one_line_and_leaves_no_trace_in_the_log(
    attacked: Running, files: object
) -> None:
    mine = Caller(attacked.url)
    begun = mine.begin("add_documents", files, "")
    text = begun.text if begun.status_code != 200 else mine.result("add_documents", begun.json()["event_id"]).text
    assert "choose it again" in text and "passwd" not in text and "null" not in text
    assert "Traceback" not in attacked.log.read_text()


def test_a_new_conversation_deletes_what_was_kept_and_makes_room(attacked: Running, folder: Path) -> None:
    mine = Caller(attacked.url)
    for number in range(3):
        before = len(stored(folder))
        mine.add((f"{number}.txt", str(number).encode() + MEGABYTE[: 600 << 10]))
        assert len(stored(folder)) == before + 1
        mine.call("clear")
        assert len(stored(folder)) == before


def test_a_short_text_is_read_while_slow_files_of_others_are(attacked: Running) -> None:
    slow = [Caller(attacked.url) for _ in range(3)]
    threads = [threading.Thread(target=caller.add, args=(("slow.pdf", SLOW_PDF),)) for caller in slow]
    for thread in threads:
        thread.start()
    assert until(lambda: len(attacked.memory.children()) >= 2)
    added = Caller(attacked.url).add(("short.txt", SHORT))
    assert [entry["state"] for entry in added["documents"]] == ["ready"]
    assert any(thread.is_alive() for thread in threads)
    for caller in slow:
        caller.begin("stop")
    for thread in threads:
        thread.join(200)


@pytest.mark.parametrize("way", ["clear", "two at once"])
def test_the_memory_of_large_texts_is_given_back(attacked: Running, way: str) -> None:
    callers = [Caller(attacked.url) for _ in range(2 if way == "two at once" else 1)]
    for caller in callers:
        caller.add(("warm.txt", MEGABYTE[: 100 << 10]))
        caller.call("clear")
    before = attacked.rss()

    def add(caller: Caller) -> None:
        for number in range(2):
            caller.add((f"{number}.txt", str(number).encode() + MEGABYTE[: 900 << 10]))
            caller.call("clear")

    threads = [threading.Thread(target=add, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert until(lambda: attacked.rss() < before + (30 << 20), seconds=60)
