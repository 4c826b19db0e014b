"""``tidekv ask --questions``: lines in, lines of JSON out, in the same order."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.streams import run_main
from tests.models.support import save_tiny_llama
from tidekv_llm.cli.questions import AnswerLines, read_lines
from tidekv_llm.errors import Cancelled, ConfigError

QUESTIONS = ["w5 w6?", "w2?", "w9 w10 w2?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    document, questions = tmp_path / "a.txt", tmp_path / "questions.txt"
    document.write_text("w2 w3 w4. w5 w6 w7. w8 w9 w10.", "utf-8")
    questions.write_text("\ufeff" + "\n\n".join(QUESTIONS) + "\n", "utf-8")
    return document, questions


def test_every_line_is_answered_as_alone(
    model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    document, questions = files
    options = ["--model", str(model), "--max-new-tokens", "8", "--dtype", "float32", "--quiet"]
    code, out, error = run_main(monkeypatch, ["ask", str(document), "--questions", str(questions), *options])
    assert (code, error) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["question"] for answer in answers] == QUESTIONS
    for question, answer in zip(QUESTIONS, answers, strict=True):
        _, out, _ = run_main(monkeypatch, ["ask", str(document), question, "--json", *options])
        assert json.loads(out)["answer"] == answer["answer"]


def test_questions_come_from_standard_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("One?\n \nTwo?\n"))
    assert read_lines("-") == ["One?", "Two?"]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.bin"
    path.write_bytes(b"\xff\xfe\x00?")
    with pytest.raises(ConfigError, match="no UTF-8 text"):
        read_lines(str(path))


def test_a_question_that_failed_says_why_and_sets_the_exit_status() -> None:
    printed: list[dict[str, object]] = []

    class Printer:
        def line(self, value: dict[str, object]) -> None:
            printed.append(value)

    lines = AnswerLines(["One?", "Two?"], Printer())  # type: ignore[arg-type]
    lines.add(1, Cancelled("stopped"))
    assert printed == []  # in the order of asking
    lines.add(0, Cancelled("stopped too"))
    assert [line["error"] for line in printed] == ["stopped too", "stopped"]
    assert lines.failed == 1
