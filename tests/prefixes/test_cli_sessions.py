"""``tidekv ask --session`` and ``tidekv sessions``, with the embedded model (bfloat16 where the CPU has it)."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.sessions_for_tests import assert_same, follow_up, fresh
from tidekv_llm import Document, PrefillConfig, TideKV
from tidekv_llm.cli import main
from tidekv_llm.errors import CacheError
from tidekv_llm.prefixes.conversation import Conversation
from tidekv_llm.prefixes.named import session_folder

LIGHTHOUSE = Path(__file__).parents[2] / "examples" / "lighthouse.txt"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded_model_path: Path) -> None:
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path / "cache"))


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code = main([*arguments, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert ("error" in printed) == (code != 0)
    return printed


def test_the_conversation_goes_on_between_commands(
    capsys: pytest.CaptureFixture[str], embedded_model_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "light.txt"
    file.write_text(LIGHTHOUSE.read_text(encoding="utf-8")[:3000], encoding="utf-8")

    def ask(question: str, *more: str) -> Any:
        common = ("--model", str(embedded_model_path), "--max-new-tokens", "12", "--session", "light")
        return output(capsys, "ask", str(file), question, *common, *more)

    first = ask("How much fuel does the main tank hold?")
    alone = ask("And who lights the lamp up there every evening?", "--independent")
    later = ask("And who lights the lamp up there every evening?")
    assert first["metrics"]["reused_prefix_tokens"] == 0
    assert alone["metrics"]["reused_prefix_tokens"] == later["metrics"]["reused_prefix_tokens"] > 500
    assert later["prompt_tokens"] > alone["prompt_tokens"] + 12
    conversation = session_folder("light") / "conversation.json"
    turns = json.loads(conversation.read_text())["turns"]
    assert [turn[1] for turn in turns] == [first["answer"], later["answer"]]
    assert stat.S_IMODE(conversation.stat().st_mode) == 0o600
    file.write_text("Another text altogether. " * 20)
    assert ask("Why?")["metrics"]["reused_prefix_tokens"] == 0
    assert [turn[0] for turn in json.loads(conversation.read_text())["turns"]] == ["Why?"]

    (listed,) = output(capsys, "sessions", "list")
    assert (listed["name"], listed["documents"]) == ("light", 2)
    assert main(["sessions", "list"]) == 0
    assert "light" in capsys.readouterr().out
    assert output(capsys, "sessions", "rm", "light") == {"removed": "light", "bytes": listed["bytes"]}
    assert output(capsys, "sessions", "rm", "light")["error"]["exit_code"] == 1
    assert output(capsys, "sessions", "list") == []
    assert main(["sessions", "list"]) == 0
    assert "No sessions" in capsys.readouterr().out


def test_bad_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(LIGHTHOUSE)
    assert output(capsys, "ask", file, "Why?", "--independent")["error"]["exit_code"] == 2
    assert output(capsys, "ask", file, "Why?", "--session", "../x")["error"]["exit_code"] == 2
    assert output(capsys, "sessions")["error"]["exit_code"] == 2


def test_the_table_tells_what_was_reused(
    capsys: pytest.CaptureFixture[str], embedded_model_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "note.txt"
    file.write_text("The lamp is lit at dusk. " * 20)
    arguments = ["ask", str(file), "Who?", "--model", str(embedded_model_path), "--max-new-tokens", "2"]
    for expected in (False, True):
        assert main([*arguments, "--session", "t", "--independent"]) == 0
        assert ("reused" in capsys.readouterr().out) is expected


def test_the_embedded_model_gives_the_same_text_and_kept_sets(embedded_model_path: Path) -> None:
    document = Document.from_pages([LIGHTHOUSE.read_text(encoding="utf-8")[:4000]], "light", ["1"])
    questions = ["How much fuel does the main tank hold?", "Which lamp burns in the lantern room at night?"]
    config = PrefillConfig(kept_tokens=256, chunk_size=512)
    with TideKV.from_pretrained(embedded_model_path, prefill=config) as llm, llm.open(document) as session:
        session.ingest()
        for question in questions:
            assert_same(follow_up(session, question), fresh(session, question))
            expected = llm.ask(document, question, max_new_tokens=16)
            answer = session.ask(question, remember=False, max_new_tokens=16)
            assert (answer.text, answer.page_strip_by_layer) == (expected.text, expected.page_strip_by_layer)
            assert answer.metrics.reused_prefix_tokens == session.document_tokens


def test_conversations_survive_damage_and_belong_to_their_documents(tmp_path: Path) -> None:
    Conversation("a", [("q", "é")]).save(tmp_path)
    assert Conversation.load(tmp_path, "a").turns == [("q", "é")]
    assert Conversation.load(tmp_path, "b").turns == []
    for content in ("", "[]", '{"turns": [1], "fingerprint": "a"}', '{"turns": 3}', "\x00"):
        (tmp_path / "conversation.json").write_text(content)
        assert Conversation.load(tmp_path, "a") == Conversation("a", [])
    with pytest.raises(CacheError, match="could not be stored"):
        Conversation("a").save(tmp_path / "missing")
