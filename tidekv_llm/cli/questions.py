"""``tidekv ask --questions``: one question a line in, one JSON object a line out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidekv_llm.errors import ConfigError

if TYPE_CHECKING:
    from tidekv_llm.cli.answers import AskConsole
    from tidekv_llm.engine.together import Outcome


def read_lines(path: str) -> list[str]:
    """Questions of a file, or of standard input for ``-``; empty lines are none.

    Raises:
        ConfigError: it cannot be read, is no UTF-8 text, or has no question.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--questions {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--questions {path}: it is no UTF-8 text; save it as UTF-8") from error
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise ConfigError(f"--questions {path}: there is no question in it; write one a line")
    return questions


class AnswerLines:
    """Prints outcomes in the order of the questions, each as soon as those before it are there.

    Attributes:
        failed: 1 once a question had no answer, for the exit status.
    """

    def __init__(self, questions: Sequence[str], console: AskConsole) -> None:
        self._questions, self._console = questions, console
        self._early: dict[int, Outcome] = {}
        self._next = self.failed = 0

    def add(self, number: int, outcome: Outcome) -> None:
        """A question's outcome."""
        self._early[number] = outcome
        while self._next in self._early:
            self._print(self._questions[self._next], self._early.pop(self._next))
            self._next += 1

    def _print(self, question: str, outcome: Outcome) -> None:
        from tidekv_llm.engine import Answer

        found = outcome.as_dict() if isinstance(outcome, Answer) else {"error": str(outcome)}
        self.failed = self.failed or int("error" in found)
        self._console.line({"question": question, **found})
