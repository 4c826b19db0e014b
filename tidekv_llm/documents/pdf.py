"""PDF to pages, in a child process that may use only so much memory, CPU time and wall time.

A PDF is a program written by a stranger. The parent never parses it: it starts ``pdf_worker``, reads framed
JSON from a pipe, and turns whatever happens to the child into one typed, one-line error.
"""

from __future__ import annotations

import json
import queue
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tidekv_llm import sandbox
from tidekv_llm.documents.cleanup import join_hyphens
from tidekv_llm.errors import (
    ConfigError,
    DocumentError,
    DocumentTimeoutError,
    EncryptedDocumentError,
)

Progress = Callable[[int, int], None]
"""Called with (pages done, pages selected), also while one page takes long; what it raises stops the worker."""

_HEARTBEAT_SECONDS = 0.5

PageRange = tuple[int, int]
"""First and last physical page, both 1-based and inclusive."""


@dataclass(frozen=True, kw_only=True)
class PdfLimits:
    """What one PDF may cost.

    Args:
        memory_bytes: address space of the worker (where the system can limit it).
        cpu_seconds: CPU time of the worker.
        wall_seconds: deadline for the whole document.
        page_seconds: CPU time for one page; one that takes longer is read when the others are, with another reader
            (the extra ``preview``) or in what is left of ``cpu_seconds``.
        max_pages: pages read at most; a longer document needs a selection.
        max_characters: characters of text in all.
        max_page_characters: characters of text on one page.
        max_file_bytes: size of the file.
    """

    memory_bytes: int = 2 << 30
    cpu_seconds: int = 120
    wall_seconds: float = 180.0
    page_seconds: float = 6.0
    max_pages: int = 20_000
    max_characters: int = 50_000_000
    max_page_characters: int = 1_000_000
    max_file_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"PdfLimits.{name}={value} must be above 0")


@dataclass(frozen=True)
class PageRecord:
    """One page as the worker sent it."""

    number: int
    label: str
    text: str
    problem: str | None


@dataclass(frozen=True)
class Extraction:
    """All selected pages of a PDF, the pages it has in all, and what was left out or looked odd."""

    pages: tuple[PageRecord, ...]
    page_count: int
    warnings: tuple[str, ...]


def extract_pdf(
    path: Path,
    *,
    name: str,
    password: str | None = None,
    ranges: Sequence[PageRange] | None = None,
    progress: Progress | None = None,
    limits: PdfLimits | None = None,
) -> Extraction:
    """Read the pages of the PDF at ``path``; ``name`` stands for it in messages.

    Raises:
        EncryptedDocumentError: a password is needed, or the one given is wrong.
        ConfigError: ``ranges`` goes beyond the last page.
        DocumentError: damaged, or beyond a limit.
    """
    limits = limits or PdfLimits()
    size = path.stat().st_size
    if size > limits.max_file_bytes:
        raise DocumentError(
            f"{name} has {size:,} bytes, more than the {limits.max_file_bytes:,} allowed; split the file"
        )
    worker = _Worker(_request(path, password, ranges, limits), limits)
    try:
        return _collect(worker, name, limits, progress)
    finally:
        worker.close()


def _request(path: Path, password: str | None, ranges: Sequence[PageRange] | None, limits: PdfLimits) -> dict[str, Any]:
    return {
        **vars(limits),
        "path": str(path),
        "password": password,
        "ranges": None if ranges is None else [list(pair) for pair in ranges],
        "max_tree_entries": max(100_000, 2 * limits.max_pages),
    }


def _collect(worker: _Worker, name: str, limits: PdfLimits, progress: Progress | None) -> Extraction:
    pages: dict[int, PageRecord] = {}
    done: set[int] = set()  # pages that are not tried again
    warnings: dict[str, list[int]] = {}
    total = selected = 0
    complete = False

    def report() -> None:
        if progress is not None and selected:
            progress(len(done), selected)

    while (message := worker.next_message(name, report)) is not None:
        kind = message["kind"]
        if kind == "start":
            total, selected = message["pages"], message["selected"]
        elif kind == "page":
            number = message["number"]
            pages[number] = PageRecord(number, message["label"], message["text"], message["problem"])
            if number not in done and not message["later"]:
                done.add(number)
                report()
        elif kind == "warning":
            numbers = warnings.setdefault(message["text"], [])
            numbers += [] if message["page"] is None else [message["page"]]
        elif kind == "end":
            complete = True
        elif kind == "failed":
            raise _failure(name, message["reason"], message["text"], limits)
        elif kind == "closed":
            break
    if not complete:
        raise DocumentError(worker.why_it_died(name, len(pages), selected))
    ordered = [pages[number] for number in sorted(pages)]
    mended = join_hyphens([page.text for page in ordered])
    return Extraction(
        tuple(replace(page, text=text) for page, text in zip(ordered, mended, strict=True)),
        total,
        tuple(_with_pages(text, numbers) for text, numbers in warnings.items()),
    )


def _with_pages(warning: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return warning
    return f"page{'s' * (len(set(numbers)) > 1)} {format_numbers(numbers)}: {warning}"


def format_numbers(numbers: Sequence[int]) -> str:
    """``[3, 7, 8, 9]`` as ``"3, 7-9"``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _failure(name: str, reason: str, text: str, limits: PdfLimits) -> Exception:
    """The typed error for a reason that the worker gave."""
    if reason == "password":
        return EncryptedDocumentError(f"{name} is encrypted; give its password")
    if reason == "wrong-password":
        return EncryptedDocumentError(f"wrong password for {name}; give the right one")
    if reason == "range":
        return ConfigError(f"pages of {name} must lie within 1-{text}; choose again")
    messages = {
        "dependency": f"{name} is encrypted; decryption needs `pip install pypdf[crypto]`",
        "no-pages": f"{name} has no pages; check that it opens in a PDF viewer",
        "too-many-pages": f"{name}: {text} pages are more than the {limits.max_pages} read at once; "
        f"choose some with pages='1-{limits.max_pages}'",
        "too-much-text": f"{name} has more than {limits.max_characters:,} characters by page {text}; "
        "choose fewer pages with pages='1-...'",
        "memory": f"{name} needs more than {limits.memory_bytes >> 20} MiB to read; choose fewer pages",
        "time": f"{name} was not open after {text} s of CPU time; a quicker reader comes with "
        "pip install 'tidekv-llm[preview]'; or print it to a new PDF",
    }
    fallback = f"{name} is damaged ({text.rstrip('.')}); repair the file, e.g. with qpdf"
    return DocumentError(messages.get(reason, fallback))


class _Worker:
    """The child process, and a thread that reads its messages so that waiting can have a deadline."""

    def __init__(self, request: dict[str, Any], limits: PdfLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.wall_seconds
        # Four bytes of JSON per ASCII character is plenty; escapes take six per UTF-16 unit.
        self._max_message = 16 * limits.max_page_characters + 4096
        # A slow caller makes the worker wait in its pipe instead of filling the parent's memory.
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=64)
        self._closing = threading.Event()
        self._process = sandbox.start(
            "tidekv_llm.documents.pdf_worker",
            request,
            memory_bytes=limits.memory_bytes,
            cpu_seconds=limits.cpu_seconds,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def next_message(self, name: str, waiting: Callable[[], None]) -> dict[str, Any] | None:
        """The next message, or None when the worker is gone; ``waiting`` is called now and then until it comes.

        Raises:
            DocumentTimeoutError: past the deadline.
        """
        while (remaining := self._deadline - time.monotonic()) > 0:
            try:
                return self._messages.get(timeout=min(_HEARTBEAT_SECONDS, remaining))
            except queue.Empty:
                waiting()
        raise DocumentTimeoutError(f"{name} was not read within {self._limits.wall_seconds:g} s; choose fewer pages")

    def why_it_died(self, name: str, done: int, selected: int) -> str:
        """One line on a worker that ended without saying so."""
        code = self._process.wait()
        where = f"after {done} of {selected} pages" if selected else "before the first page"
        if code == -getattr(signal, "SIGXCPU", 0) or code == -getattr(signal, "SIGKILL", 0):
            cause = f"it took more than {self._limits.cpu_seconds} s of CPU time or too much memory"
        else:
            cause = f"the PDF worker stopped with code {code}"
        return f"{name} could not be read {where}: {cause}; choose fewer pages or repair the file"

    def close(self) -> None:
        """Stop the child and wait for it: no process and no thread outlives the call."""
        self._closing.set()
        if self._process.poll() is None:
            self._process.kill()
        self._reader.join(timeout=5)
        sandbox.stop(self._process)

    def _read(self, stream: IO[bytes]) -> None:
        message: dict[str, Any] | None = {}
        while message is not None:
            message = self._read_message(stream)
            while not self._closing.is_set():
                try:
                    self._messages.put(message, timeout=0.2)
                    break
                except queue.Full:
                    continue
            else:
                return

    def _read_message(self, stream: IO[bytes]) -> dict[str, Any] | None:
        """One framed message; None at the end of the stream and for anything malformed."""
        try:
            header = stream.read(4)
            if len(header) < 4:
                return None
            (length,) = struct.unpack(">I", header)
            if length > self._max_message:
                return None
            data = stream.read(length)
            message = json.loads(data) if len(data) == length else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) and "kind" in message else None
