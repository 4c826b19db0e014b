r"""What reaches a terminal: text as it is, harmless, in whatever encoding the stream has.

Answers, documents and file names are other people's text. Rich reads no markup in it, control characters are shown
instead of sent (``\x1b[2J`` clears nobody's screen), and what an encoding lacks is shown as an escape, not lost.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

# Everything that a terminal obeys: C0 and C1 controls, and the overrides that turn the direction of reading.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e]")
_OBEYED_OR_BREAK = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202d\u202e]")
_JSON_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\u202d\u202e\ud800-\udfff]")


def forgive_encodings() -> None:
    """Let both streams show what their encoding lacks as an escape, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def literal(text: str, stream: TextIO | None = None) -> str:
    r"""Text of several lines as it may be printed: controls but tab and newline become ``\x1b``, and so on."""
    return _encodable(_OBEYED.sub(_escape, text), stream)


def one_row(text: str, stream: TextIO | None = None) -> str:
    r"""Text for one line or cell: tabs and line ends are shown as well (``\n``)."""
    return _encodable(_OBEYED_OR_BREAK.sub(_escape, text), stream)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _encodable(text: str, stream: TextIO | None) -> str:
    encoding = _encoding(stream or sys.stdout)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


def console(*, stderr: bool = False) -> Console:
    """A rich console that takes every string literally and breaks no line."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One line of JSON on standard output, in ASCII where the encoding is not UTF-8."""
    text = json.dumps(value, ensure_ascii=not _encoding(sys.stdout).lower().startswith("utf"))
    print(_JSON_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def print_table(
    rows: Iterable[Sequence[str | Text]],
    headings: Sequence[str] = (),
    *,
    right: Collection[int] = (),
    dim: Collection[int] = (),
    title: str = "",
) -> None:
    """Print whole rows: a terminal breaks a long line by itself, and a file or a copied path needs it unbroken.

    Args:
        rows: cells; only a ``Text`` brings style of its own.
        headings: of the columns, if they have any.
        right: columns that are set flush right.
        dim: columns that are of less interest.
        title: a line above the table.
    """
    head = [Text(heading) for heading in headings]
    body = [[cell if isinstance(cell, Text) else Text(one_row(cell)) for cell in row] for row in rows]
    table = [head, *body] if head else body
    widths = [max(cell.cell_len for cell in column) for column in zip(*table, strict=True)]
    out = console()
    if title:
        out.print(Text(one_row(title), "italic"))
    for row in table:
        styles = ["bold" if row is head else "dim" if index in dim else "" for index in range(len(row))]
        for index, cell in enumerate(row):
            cell.style = cell.style or styles[index]
            cell.align("right" if index in right else "left", widths[index])
        line = Text("  ").join(row)
        line.rstrip()
        out.print(line)


class Bars:
    """Progress on standard error, a bar a stage; nothing where no terminal is, or with ``hidden``.

    Args:
        hidden: show nothing.
        remaining: estimate the time left from the steps so far.
    """

    def __init__(self, *, hidden: bool, remaining: bool = False) -> None:
        error = console(stderr=True)
        self._stream = sys.stderr  # rich puts itself in its place while bars are shown
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%", markup=False),
        ]
        if remaining:
            columns.append(TimeRemainingColumn(compact=True))
        columns.append(TextColumn("{task.fields[detail]}", style="dim", markup=False))
        self._progress = Progress(
            *columns,
            console=error,
            transient=True,
            disable=hidden or not error.is_terminal,
            speed_estimate_period=3600,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def show(self, stage: str, fraction: float, detail: str = "") -> None:
        """Move a stage's bar, which begins with its first call."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(one_row(stage, self._stream), total=1.0, detail="")
        self._progress.update(self._tasks[stage], completed=fraction, detail=one_row(detail, self._stream))
