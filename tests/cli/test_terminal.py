"""What users, documents and models wrote is printed as it is, in every encoding, and nothing obeys it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.streams import Stream, run_main
from tidekv_llm.bench import harness
from tidekv_llm.cli.answers import AskConsole
from tidekv_llm.cli.terminal import literal, one_row
from tidekv_llm.documents import Citation, Document, PageSpan, Prompt, cite_pages
from tidekv_llm.engine import Answer, TideKV
from tidekv_llm.metrics import Metrics

ROOT = Path(__file__).parents[2]
# What rich reads as an emoji, as markup, as a link; what it would strip or expand.
LITERAL = "root:x:0:0:/root :smile: [bold]red[/bold] [/] \\[x] [link=file:///x]y[/link]\tTab\n  indented  \nend "
# What a terminal obeys: a cleared screen, a new title, a colour in one character, a text that runs backwards.
HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x9b31md\x08e\rf\x7fg\u202eh"
SHOWN = r"a\x1b[2Jb\x1b]0;title\x07c\x9b31md\x08e\rf\x7fg\u202eh"
FOREIGN = "Größe 水箱 7400升 🐳"


def answer(text: str, name: str = "a.txt", quote: str | None = None, reasoning: str = "") -> Answer:
    citation = Citation(
        document=0, document_name=name, page=1, label="iv", origin="text", verified=True, quote=quote, score=0.5
    )
    return Answer(
        text=text,
        reasoning=reasoning,
        citations=(citation,),
        metrics=Metrics(notes=[f"note {name}"]),
        prompt_tokens=3,
        finish_reason="stop",
        warnings=(f"warning {name}",),
        prompt=Prompt((1, 2, 3), (), 2, "How much?"),
        evidence=None,
        page_strip_by_layer=(),
    )


class StandIn:
    """An engine that answers with what the test says, in pieces of three characters."""

    def __init__(self, reply: Any, name: str) -> None:
        self.reply, self.name = reply, name

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def ask(self, documents: Any, question: str, *, on_text: Any, on_reasoning: Any, **options: Any) -> Any:
        if self.reply.reasoning:
            on_reasoning(self.reply.reasoning)
        for start in range(0, len(self.reply.text), 3):
            on_text(self.reply.text[start : start + 3])
        return self.reply


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """``tidekv ask`` of a file with a name of the test's, answered as the test says."""

    def run(reply: Any, *more: str, model: str = "model", file: str = "a.txt", **streams: Any) -> tuple[int, str, str]:
        path = tmp_path / file
        path.write_text("The tank holds 7,400 litres.", encoding="utf-8")
        monkeypatch.setattr(TideKV, "from_pretrained", lambda *_, **__: StandIn(reply, model))
        return run_main(monkeypatch, ["ask", str(path), "How much?", *more], **streams)

    return run


@pytest.mark.parametrize("terminal", [False, True])
def test_an_answer_is_printed_as_it_is(ask, terminal):
    code, out, _ = ask(answer(LITERAL), terminal=terminal)
    assert code == 0
    assert f"\n{LITERAL}\n" in out


def test_an_answer_of_one_empty_text_says_so(ask):
    assert "(the model gave an empty answer)" in ask(answer(""))[1]


@pytest.mark.parametrize("name", ["root:x:0:0", "[bold]file[/bold].txt", ":smile:.txt", "[/].txt"])
@pytest.mark.parametrize("terminal", [False, True])
def test_names_quotes_warnings_notes_and_models_are_printed_as_they_are(ask, name, terminal):
    _, out, _ = ask(answer("x", name, quote=f"quoted {name}"), model=f"m/{name}", terminal=terminal)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    for expected in (f"quoted {name}", f"warning {name}", f"note {name}", f"m/{name}", "[p. iv]"):
        assert expected in plain


def obeyed(text: str) -> str:
    """The characters that a terminal would obey, our own styles aside."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "".join(
        char for char in plain if (unicodedata.category(char) == "Cc" and char not in "\n\t") or char in "\u202d\u202e"
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_that_a_terminal_obeys_is_sent(ask, terminal):
    _, out, error = ask(answer(HOSTILE, HOSTILE, quote=HOSTILE), model=HOSTILE, terminal=terminal)
    assert "\x1b[31m" not in out
    assert out.count(SHOWN) == 5  # answer, quote, warning, model, note
    assert obeyed(out) == ""
    assert HOSTILE not in error


def test_citations_of_files_of_one_name_are_told_apart(ask, monkeypatch, tmp_path):
    other = tmp_path / "other" / "a.txt"
    other.parent.mkdir()
    other.write_text("The tank holds 36 litres.")
    documents = [Document.from_file(other), Document.from_file(other)]
    found = cite_pages("It holds 36 litres.", [PageSpan(1, 1, "1", 0, 5)], documents)
    reply = replace(answer("36 litres"), citations=found)
    command = ["ask", str(other), str(other), "How much?"]
    ask(reply)
    assert "[a.txt (2) p. 1]" in run_main(monkeypatch, command)[1]
    assert json.loads(run_main(monkeypatch, [*command, "--json"])[1])["citations"][0]["document"] == "a.txt (2)"


def test_a_style_of_the_answer_does_not_pass_for_one_of_ours(ask):
    _, out, _ = ask(answer("\x1b[31mred"), terminal=True)
    assert "\x1b[31m" not in out
    assert r"\x1b[31mred" in out


def test_reasoning_is_shown_to_who_watches_and_is_no_part_of_the_answer(ask):
    reply = answer("36 litres", reasoning=f"hm [bold] :x: {HOSTILE}")
    _, out, error = ask(reply, terminal=True)
    assert "hm [bold] :x: " in error
    assert SHOWN in error
    assert "hm" not in out
    for options in (("--quiet",), ("--json",)):
        assert "hm" not in ask(reply, *options, terminal=True)[2]
    _, out, error = ask(reply)
    assert "hm" not in out + error
    assert json.loads(ask(reply, "--json")[1])["reasoning"] == reply.reasoning


def test_json_holds_the_text_and_obeys_nothing(ask):
    text = HOSTILE + LITERAL + FOREIGN + "\ud83d"
    code, out, _ = ask(answer(text, HOSTILE), "--json")
    assert code == 0
    printed = json.loads(out)
    assert printed["answer"] == text
    assert printed["citations"][0]["document"] == HOSTILE
    assert obeyed(out) == ""
    assert "水箱" in out  # readable where the encoding allows it


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437", "shift_jis", "utf-8", "utf-16"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_narrow_encodings_lose_nothing(ask, encoding, form):
    code, out, error = ask(answer(FOREIGN, FOREIGN, quote=FOREIGN), *form, model=FOREIGN, encoding=encoding)
    assert (code, error) == (0, "")
    if form:
        assert json.loads(out)["answer"] == FOREIGN
    else:
        expected = FOREIGN.encode(encoding, "backslashreplace").decode(encoding)
        assert out.count(expected) == 5


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_errors_in_narrow_encodings(monkeypatch, encoding, form):
    code, out, error = run_main(monkeypatch, ["ask", "水箱.pdf", "?", *form], encoding=encoding)
    assert code == 1
    if form:
        assert "水箱.pdf" in json.loads(out)["error"]["message"]
    else:
        assert r"\u6c34\u7bb1.pdf" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["two\nlines.pdf", "bell\x07.pdf", "clear\x1b[2J.pdf", "line\u2028end.pdf"])
def test_an_error_about_a_strange_name_is_one_harmless_line(monkeypatch, name):
    code, _, error = run_main(monkeypatch, ["ask", name, "?"])
    assert code == 1
    assert len(error.splitlines()) == 1
    assert obeyed(error) == ""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("name", ["[bold]x[red].pdf", ":x:.pdf", "two\nlines\x1b[2J.pdf", "水箱.pdf"])
def test_progress_shows_names_as_they_are_and_only_to_a_terminal(monkeypatch, name, encoding):
    seen = {}
    for terminal in (True, False):
        stream = Stream(encoding, terminal=terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        with AskConsole(as_json=False, quiet=False) as console:
            console.reading(name)(1, 2)
            console.loading(name, 0.5)
        seen[terminal] = stream.text
    assert seen[False] == ""
    assert f"Reading {one_row(name, stream)}" in seen[True]
    assert "\x1b[2J" not in seen[True]
    assert "\nlines" not in seen[True]


# --- the other commands ---


def test_the_doctor_names_every_line(monkeypatch):
    _, out, _ = run_main(monkeypatch, ["doctor"])
    for name in ("[langchain]", "[llama-index]", "[app]", "[preview]", "[bench]"):
        assert name in out
    assert all(line[4:20].strip() for line in out.splitlines() if not line.startswith("    "))


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_doctor_models_and_sessions_with_a_strange_cache_folder(monkeypatch, tmp_path, encoding):
    folder = tmp_path / ":x: [bold] 水\x1b[2J"
    folder.mkdir()
    monkeypatch.setenv("TIDEKV_CACHE", str(folder))
    for command in (["doctor"], ["models"]):
        _, out, _ = run_main(monkeypatch, command, encoding=encoding)
        assert ":x: [bold] " in out
        assert r"\x1b[2J" in out
        assert obeyed(out) == ""
    for command in (["doctor"], ["models"], ["sessions", "list"]):
        json.loads(run_main(monkeypatch, [*command, "--json"], encoding=encoding)[1])


def test_sessions_are_listed_as_they_are(monkeypatch):
    from tidekv_llm.prefixes import named

    one = named.StoredSession(name=":x: [bold]y[/bold]\x1b[2J\n水", documents=1, tokens=2, bytes=3, used=0.0)
    monkeypatch.setattr(named, "list_sessions", lambda: [one])
    _, out, _ = run_main(monkeypatch, ["sessions", "list"], encoding="ascii", terminal=True)
    assert r":x: [bold]y[/bold]\x1b[2J\n\u6c34" in out


def test_the_plan_prints_its_model_as_it_is(monkeypatch, tmp_path):
    folder = tmp_path / "[bold]:x:[red]"
    folder.mkdir()
    (folder / "config.json").write_text((ROOT / "tidekv_llm/planner_configs/smollm2-135m.json").read_text())
    code, out, _ = run_main(monkeypatch, ["plan", "--model", str(folder), "--context", "4096"])
    assert code == 0
    assert f"{folder}: 4,096 tokens" in out
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_table_of_a_benchmark_prints_what_it_is_given(monkeypatch, tmp_path, encoding):
    monkeypatch.setattr(harness, "run_job", lambda function, arguments: {"m [bold]水:x:": FIGURES})
    out_folder = tmp_path / "[bold]"
    command = ["bench", "decode-rate", "--model", "m/:x:[/]", "--out", str(out_folder)]
    code, out, _ = run_main(monkeypatch, command, encoding=encoding)
    assert code == 0
    for expected in ("m [bold]水:x:", "m/:x:[/]", f"{out_folder}/decode-rate.json"):
        assert expected.encode(encoding, "backslashreplace").decode(encoding) in out


FIGURES = {"cache_bytes": 2**20, "rates": [1.0, 2.0]}


# --- the functions below ---


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_what_is_harmless_is_unchanged(text):
    if not obeyed(text):
        assert literal(text) == text


@given(st.text(max_size=30), st.sampled_from(["ascii", "latin-1", "utf-8", "cp437"]))
def test_what_is_shown_can_be_printed_on_one_row(text, encoding):
    shown = one_row(text, SimpleNamespace(encoding=encoding))
    shown.encode(encoding)
    assert obeyed(shown) == ""
    assert len(f"a{shown}b".splitlines()) == 1


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        ({"PYTHONIOENCODING": "ascii"}, ["models"]),
        ({"PYTHONIOENCODING": "latin-1"}, ["models", "--json"]),
        ({"LANG": "C", "LC_ALL": "C"}, ["models"]),
        ({"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, ["sessions", "list", "--json"]),
    ],
)
def test_a_real_process_with_a_narrow_encoding(tmp_path, environment, command):
    folder = tmp_path / "水箱"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tidekv_llm.cli", *command],
        cwd=ROOT,
        env={**os.environ, "TIDEKV_CACHE": str(folder), **environment},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    if "--json" in command:
        json.loads(done.stdout)
    else:
        assert rb"\u6c34\u7bb1" in done.stdout or "水箱".encode() in done.stdout
