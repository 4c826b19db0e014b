"""Standard output and error as a test wants them: any encoding, a terminal or not, and every byte kept."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

import pytest

from tidekv_llm.cli import main


class Stream(io.TextIOWrapper):
    def __init__(self, encoding: str, *, terminal: bool) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def run_main(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], *, encoding: str = "utf-8", terminal: bool = False
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, Stream(encoding, terminal=terminal))
        code = main(arguments)
        return code, sys.stdout.text, sys.stderr.text
