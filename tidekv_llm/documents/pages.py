"""A document as the rest of the package sees it: numbered pages of text, and what is missing."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tidekv_llm.documents.cleanup import strip_hidden
from tidekv_llm.documents.kinds import MAGIC_WINDOW, PDF_MAGIC, kind_of, passes_for_pdf
from tidekv_llm.documents.pdf import PageRange, PdfLimits, Progress, extract_pdf, format_numbers
from tidekv_llm.documents.readable import find_problem
from tidekv_llm.documents.words import normal
from tidekv_llm.errors import ConfigError, DocumentError, DocumentNotFoundError, NoTextError

PageSelection = str | Iterable[int]
"""Physical page numbers: ``"1-3,7"`` or any iterable of ints."""

_MAX_TEXT_BYTES = 128 << 20
_RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")


@dataclass(frozen=True)
class Page:
    """One page.

    Args:
        number: 1-based physical page number.
        label: what is printed on the page (``iv``, ``A-3``), or the number; unique within the document.
        text: cleaned where it came out of a PDF; kept even when it is unreadable, so that a viewer can show it.
        problem: why the text is not given to the model, or None.
    """

    number: int
    label: str
    text: str
    problem: str | None = None

    @property
    def readable(self) -> bool:
        """Whether the page goes into a prompt."""
        return self.problem is None and bool(self.text.strip())


@dataclass(frozen=True)
class Document:
    """Pages with a name; ``warnings`` says everything that was left out or looked odd."""

    name: str
    pages: tuple[Page, ...]
    warnings: tuple[str, ...] = ()

    @cached_property
    def text(self) -> str:
        """The readable pages, separated by form feeds."""
        return "\f".join(page.text for page in self.pages if page.readable)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of labels and text: the same content under another name has the same hash."""
        digest = hashlib.sha256()
        for page in self.pages:
            for part in (str(page.number), page.label, page.text, page.problem or ""):
                data = part.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    @classmethod
    def from_pdf(
        cls,
        path: str | os.PathLike[str],
        password: str | None = None,
        pages: PageSelection | None = None,
        progress: Progress | None = None,
        limits: PdfLimits | None = None,
    ) -> Document:
        """Read a PDF in a limited child process.

        Args:
            path: the file.
            password: user or owner password; the empty one is tried anyway.
            pages: physical pages to read; all when None.
            progress: called with (pages done, pages selected).
            limits: what the file may cost.

        Raises:
            DocumentNotFoundError: no such file, or it is a folder.
            EncryptedDocumentError: a password is needed, or it is wrong.
            NoTextError: no selected page has text (a scan).
            ConfigError: bad ``pages``.
            DocumentError: empty, not a PDF, damaged, or beyond a limit.
        """
        file = _regular_file(path)
        ranges = None if pages is None else parse_pages(pages)
        if PDF_MAGIC not in (head := _head(file)):
            raise DocumentError(f"{file.name} is not a PDF; it holds {kind_of(head)}: download or save it again")
        found = extract_pdf(file, name=file.name, password=password, ranges=ranges, progress=progress, limits=limits)
        made = tuple(Page(page.number, page.label, page.text, page.problem) for page in found.pages)
        if not any(page.text.strip() for page in made):
            raise NoTextError(_no_text_message(file.name, made))
        return cls(file.name, made, (*_problem_warnings(made), *found.warnings))

    @classmethod
    def from_text(cls, text: str, name: str = "text", label: str | None = None) -> Document:
        """Make a document of plain text, taken verbatim (NFC); form feeds separate pages.

        ``label`` names the page when there is one; several pages become ``label-1``, ``label-2``, ...

        Raises:
            NoTextError: nothing but white space.
            ConfigError: ``text`` is not a string.
        """
        if not isinstance(text, str):
            raise ConfigError(f"text must be a str, not {type(text).__name__}; decode it first")
        parts = text.split("\f")
        if len(parts) > 1 and not parts[-1].strip():  # a form feed ends the last page of a printer file
            parts.pop()
        if label is None:
            return cls.from_pages(parts, name)
        labels = [label] if len(parts) == 1 else [f"{label}-{number}" for number in range(1, len(parts) + 1)]
        return cls.from_pages(parts, name, labels)

    @classmethod
    def from_pages(cls, texts: Iterable[str], name: str, labels: Sequence[str] | None = None) -> Document:
        """Make a document of one string per page, taken verbatim (NFC).

        ``labels`` must be as many as the pages, distinct and not empty.

        Raises:
            NoTextError: nothing but white space.
            ConfigError: bad ``labels``, or a page that is not a string.
        """
        pages = tuple(texts) if not isinstance(texts, str) else (texts,)
        wrong = [type(text).__name__ for text in pages if not isinstance(text, str)]
        if wrong:
            raise ConfigError(f"every page must be a str, not {wrong[0]}; decode it first")
        shown = tuple(labels) if labels is not None else tuple(str(n) for n in range(1, len(pages) + 1))
        _check_labels(shown, len(pages))
        made = tuple(_text_page(number, *pair) for number, pair in enumerate(zip(shown, pages, strict=True), 1))
        if not any(page.text.strip() for page in made):
            raise NoTextError(f"{name} holds no text; give a document that has some")
        return cls(name, made, (*_problem_warnings(made), *_hidden_warnings(pages)))

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        password: str | None = None,
        pages: PageSelection | None = None,
        progress: Progress | None = None,
    ) -> Document:
        """Read a PDF, or a UTF-8 text or Markdown file verbatim; what is called ``.pdf`` must be one.

        Raises:
            DocumentError: as ``from_pdf``; also for anything that is neither PDF nor UTF-8 text.
        """
        file = _regular_file(path)
        if passes_for_pdf(_head(file), file.name):
            return cls.from_pdf(file, password=password, pages=pages, progress=progress)
        document = cls.from_text(_read_text(file), file.name)
        return document if pages is None else document.select(pages)

    def select(self, pages: PageSelection) -> Document:
        """The same document with some of its pages only.

        Raises:
            ConfigError: a page that the document does not have.
            NoTextError: none of the chosen pages has text.
        """
        ranges = parse_pages(pages)
        last = max((page.number for page in self.pages), default=0)
        if any(first < 1 or stop > last for first, stop in ranges):
            raise ConfigError(f"pages of {self.name} must lie within 1-{last}; choose again")
        kept = tuple(page for page in self.pages if any(a <= page.number <= b for a, b in ranges))
        if not any(page.text.strip() for page in kept):
            raise NoTextError(_no_text_message(self.name, kept))
        return Document(self.name, kept, self.warnings)


def parse_pages(pages: PageSelection) -> tuple[PageRange, ...]:
    """``"1-3,7"`` or ``[1, 2, 3, 7]`` as inclusive ranges: ``((1, 3), (7, 7))``.

    Raises:
        ConfigError: not numbers, a page below 1, a range that runs backwards, or nothing selected.
    """
    if isinstance(pages, str):
        ranges = tuple(_parse_range(part, pages) for part in pages.split(","))
    else:
        numbers = tuple(pages)
        wrong = [number for number in numbers if isinstance(number, bool) or not isinstance(number, int)]
        if wrong:
            raise ConfigError(f"pages holds {wrong[0]!r}; give page numbers such as [1, 2, 7]")
        ranges = tuple((number, number) for number in numbers)
    if not ranges:
        raise ConfigError("pages is empty; give page numbers such as '1-3,7', or None for all")
    below = [first for first, _ in ranges if first < 1]
    if below:
        raise ConfigError(f"pages holds {below[0]}; physical pages are counted from 1")
    return ranges


def _parse_range(part: str, whole: str) -> PageRange:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise ConfigError(f"pages={_short(whole)!r} is not a page selection; write it like '1-3,7', from page 1 on")
    first = int(match.group(1))
    last = int(match.group(2)) if match.group(2) else first
    if last < first:
        raise ConfigError(f"pages={_short(whole)!r} runs backwards; write it like '{last}-{first}'")
    return first, last


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _check_labels(labels: Sequence[str], count: int) -> None:
    if len(labels) != count:
        raise ConfigError(f"{len(labels)} labels for {count} pages; give one label per page")
    for label in labels:
        if not isinstance(label, str) or not label.strip() or re.search(r"[\[\]\n]", label):
            raise ConfigError(f"page label {label!r} must be text without brackets, e.g. 'iv' or '12'")
    if len(set(labels)) != count:
        twice = next(label for label in labels if list(labels).count(label) > 1)
        raise ConfigError(f"page label {twice!r} is used twice; labels must be distinct to be cited")


def _text_page(number: int, label: str, text: str) -> Page:
    """A page of text as it is, indentation and tabs included; only letters and their marks are composed (NFC)."""
    verbatim = normal(strip_hidden(text))
    return Page(number, label, verbatim, find_problem(verbatim) or (None if verbatim.strip() else "no text"))


def _hidden_warnings(texts: Sequence[str]) -> tuple[str, ...]:
    """What the pages had that no reader sees: it is left out, and said."""
    numbers = [number for number, text in enumerate(texts, 1) if len(strip_hidden(text)) < len(text)]
    pages = f"page{'s' * (len(numbers) > 1)} {format_numbers(numbers)}"
    return (f"{pages}: letters that no reader sees (Unicode tags); left out",) if numbers else ()


def _problem_warnings(pages: Sequence[Page]) -> tuple[str, ...]:
    """One warning per kind of problem, with its page numbers: ``pages 3, 7-9 have no text layer (scan?)``."""
    by_problem: dict[str, list[int]] = {}
    for page in pages:
        if page.problem is not None:
            # Shares differ from page to page; the warning need not.
            by_problem.setdefault(re.sub(r" \(\d+% of .*\)$", "", page.problem), []).append(page.number)
    return tuple(_problem_warning(problem, numbers) for problem, numbers in by_problem.items())


def _problem_warning(problem: str, numbers: Sequence[int]) -> str:
    several = len(numbers) > 1
    subject = f"page{'s' * several} {format_numbers(numbers)}"
    if problem.startswith("no text"):
        return f"{subject} {'have' if several else 'has'} {problem}; left out"
    return f"{subject}: {problem}; left out"


def _no_text_message(name: str, pages: Sequence[Page]) -> str:
    reasons = "; ".join(warning.removesuffix("; left out") for warning in _problem_warnings(pages)[:3])
    scan = any("no text layer" in (page.problem or "") for page in pages)
    return f"{name}: {reasons}" + "; make it searchable first, e.g. with `ocrmypdf in.pdf out.pdf`" * scan


def _regular_file(path: str | os.PathLike[str]) -> Path:
    """The path of an existing, non-empty regular file; devices and pipes could block for ever."""
    file = Path(path)
    shown = _short(str(file.name or file))
    try:
        status = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, PermissionError):
            raise DocumentError(f"{shown} cannot be opened: permission denied") from None
        raise DocumentNotFoundError(f"no file {shown!r}; check the path") from None
    if stat.S_ISDIR(status.st_mode):
        raise DocumentNotFoundError(f"{shown!r} is a folder; name a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise DocumentError(f"{shown} is not a regular file; copy its content into one")
    if status.st_size == 0:
        raise DocumentError(f"{shown} is empty (0 bytes); check how it was saved")
    return file


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAGIC_WINDOW)
    except OSError as error:
        raise DocumentError(f"{file.name} cannot be opened: {(error.strerror or 'error').lower()}") from None


def _read_text(file: Path) -> str:
    size = file.stat().st_size
    if size > _MAX_TEXT_BYTES:
        raise DocumentError(f"{file.name} has {size:,} bytes, more than the {_MAX_TEXT_BYTES:,} allowed; split it")
    data = file.read_bytes()
    if b"\0" in data:
        raise DocumentError(f"{file.name} is neither a PDF nor text (it holds NUL bytes); convert it to PDF or UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{file.name} is not UTF-8 text (byte {error.start}); convert it to PDF or UTF-8") from None
