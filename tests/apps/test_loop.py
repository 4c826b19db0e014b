"""No handler does on the event loop what grows with a document: everybody would wait for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.conftest import Running, start_driver, stop_app
from tests.apps.page_events import Tab
from tests.apps.web import Caller

LETTERS = b"The keeper of the light counts the ships and writes down the wind. " * 400
SHORT = b"The harbour master is Ida Holm."


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notes") / "calls"


@pytest.fixture(scope="module")
def watched(tiny_model_path: Path, notes: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start_driver("watched", tmp_path_factory.mktemp("watched"), tiny_model_path, notes)
    yield running
    stop_app(running)


def calls(notes: Path, where: str) -> set[str]:
    return {line.partition(" ")[2] for line in notes.read_text().splitlines() if line.startswith(f"{where} ")}


def test_no_endpoint_of_the_api_works_on_the_loop(watched: Running, notes: Path) -> None:
    notes.write_text("")
    mine = Caller(watched.url)
    mine.call("settings", {"max_new_tokens": 4})
    mine.add(("long.txt", LETTERS), ("short.txt", SHORT))
    mine.call("documents")
    mine.call("settings", {"retrieval": True})
    mine.call("clear")
    mine.add(("short.txt", SHORT))
    mine.call("ask", "Who is the harbour master?")
    for kind in ("json", "markdown"):
        mine.call("export", kind)
    mine.call("stop")
    mine.call("clear")
    expected = {"tokenizer", "sources", "file_digest", "tidy", "as_json", "as_markdown", "turn_as_dict"}
    assert calls(notes, "thread") >= expected
    assert calls(notes, "loop") == set()


def test_no_event_of_the_page_works_on_the_loop(watched: Running, notes: Path) -> None:
    """Reordering, choosing pages, the text of a file, typing, settings, asking, figures, citations, clearing."""
    notes.write_text("")
    tab = Tab(watched.url)
    tab.call("settings", {"max_new_tokens": 4})
    tab.add(("long.txt", LETTERS), ("short.txt", SHORT + b"\f" + SHORT))
    (panel,) = [html for html in tab.click("figures") if isinstance(html, str) and "tk-docs" in html]
    long, short = re.findall(r'data-act="remove" data-arg="(\w+)"', panel)
    for act, argument, value in (
        ("up", short, ""),
        ("down", short, ""),
        ("pages", short, "1"),
        ("text", long, ""),
        ("close-viewer", "", ""),
        ("remove", long, ""),
    ):
        tab.click(act, argument, value)
    tab.fire("change", "Who is", elem="tk-question")
    settings = [value if value is not None else "" for value in tab.call("settings", {}).values()]
    tab.fire("input", *settings, label="Longest answer, tokens")
    answered = tab.fire("click", "Who is the harbour master?", elem="tk-ask")
    (strip,) = re.findall(r'data-act="strip" data-arg="(\w+:0)"', " ".join(map(str, answered)))
    tab.click("strip", strip, panel="tk-figures-panel")
    tab.click("layers", panel="tk-figures-panel")
    tab.fire("click", elem="tk-export-md")
    tab.fire("click", elem="tk-export-json")
    tab.fire("click", elem="tk-clear")
    expected = {
        "tokenizer",
        "select",
        "render text.html",
        "render figures.html",
        "render documents.html",
        "as_markdown",
    }
    assert calls(notes, "thread") >= expected
    assert calls(notes, "loop") == set()
