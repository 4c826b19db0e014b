"""The child process that parses a PDF: hostile input is met here, under limits, never in the caller.

Run as ``python -m tidekv_llm.documents.pdf_worker``; ``pdf.py`` is its only caller. One JSON request comes on
standard input, framed JSON messages leave on standard output (four bytes big-endian length, then UTF-8):

    {"kind": "start", "pages": 12, "selected": 3}        the document is open
    {"kind": "page", "number": 7, "label": "vii", "text": "...", "problem": null, "later": false}
    {"kind": "warning", "text": "...", "page": 7 or null}
    {"kind": "failed", "reason": "password" | "limit" | ..., "text": "..."}   nothing follows
    {"kind": "end"}                                      all pages were sent; a second try may follow
    {"kind": "closed"}

The worker imports pypdf, regex and the standard library only. It writes no file: the process limits forbid it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, BinaryIO

from tidekv_llm import sandbox
from tidekv_llm.documents.cleanup import clean_text, strip_controls
from tidekv_llm.documents.pdf_forms import annotations_of, fields_without_page, page_fields, typed_notes
from tidekv_llm.documents.pdf_ink import Ink
from tidekv_llm.documents.readable import PARTLY_UNREADABLE_SHARE, find_problem, unreadable_share

_HEADER = struct.Struct(">I")
_MAX_LABEL = 16
_WORD_BOUNDARY = re.compile(r"\s+")
_ARABIC_NUMBER = re.compile("[\u0660-\u0669\u06f0-\u06f9](?:[.,:/\u066b\u066c]?[\u0660-\u0669\u06f0-\u06f9])*")
_TEXT_OPERATOR = re.compile(rb"T[jJ]|['\"]|Do\b")
_QUICKER = "a quicker reader comes with pip install 'tidekv-llm[preview]'; or print the page to a new PDF"


class _PageTimeout(BaseException):
    """Raised by the alarm; a BaseException so that pypdf's own ``except Exception`` cannot swallow it."""


class _Failure(Exception):
    """The whole document cannot be read: ``reason`` is one of the words that ``pdf.py`` knows."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def main() -> int:
    """Read the request, limit the process, stream the pages."""
    request = sandbox.enter()
    output = sys.stdout.buffer
    logging.disable(logging.CRITICAL)  # pypdf logs every oddity it mends; the pages are what counts
    try:
        _read_document(request, output)
    except _Failure as failure:
        _send(output, kind="failed", reason=failure.reason, text=str(failure))
    except (MemoryError, ImportError):  # a library that cannot be mapped
        _send(output, kind="failed", reason="memory", text="")
    except _PageTimeout:
        _send(output, kind="failed", reason="time", text=f"{time.process_time():.0f}")
    except RecursionError:
        _send(output, kind="failed", reason="damaged", text="its objects are nested too deeply")
    except Exception as error:  # any parser bug on hostile input ends as one plain message
        _send(output, kind="failed", reason="damaged", text=_one_line(error))
    return 0


def _read_document(request: dict[str, Any], output: BinaryIO) -> None:
    import pypdf

    settings: dict[str, Any] = {
        "page_tree_maximum_entries": int(request["max_tree_entries"]),
        # A drawing may have tens of millions of strokes: time and memory are bounded, so this need not be.
        "stream_parsing_work_maximum_count": 1 << 40,
        "jbig2dec_binary": None,  # images are not read, and no other program is started
    }
    _treat_arabic_figures_alike()
    with open(request["path"], "rb") as file, pypdf.apply_configuration(**settings):
        try:
            reader, total = _open(pypdf, file, request["password"], float(request["page_seconds"]))
        except _PageTimeout:
            if _read_with_pdfium(request, output):
                return
            reader, total = _open(pypdf, file, request["password"], _time_left(request))
        selected = _selected(request, total)
        _send(output, kind="start", pages=total, selected=len(selected))
        labels = _labels(reader, total, float(request["page_seconds"]), output)
        pages = _Pages(reader, labels, request, output)
        pages.read(selected)
        _send_notes(reader, output, float(request["page_seconds"]))
        _send(output, kind="end")
        pages.read_again()
        _send(output, kind="closed")


def _treat_arabic_figures_alike() -> None:
    """Let pypdf turn every ٧٤٠٠ round together with the letters beside it, so that ``_figures_forward`` can mend it.

    It turns some of them, by what stands before, and then 7400 is 0047; its public ``set_custom_rtl`` has no say in
    that. This process reads one file and ends.
    """
    extraction: Any = importlib.import_module("pypdf._text_extraction")
    neutral: Callable[..., bool] = extraction.is_char_neutral
    extraction.is_char_neutral = lambda char, *more: not _ARABIC_NUMBER.match(char) and neutral(char, *more)


def _figures_forward(text: str) -> str:
    """Figures run from left to right in Arabic and Persian too."""
    return _ARABIC_NUMBER.sub(lambda match: match[0][::-1], text)


def _time_left(request: dict[str, Any]) -> float:
    """CPU seconds before the system ends the process, less what it takes to say so."""
    return max(0.1, 0.9 * float(request["cpu_seconds"]) - time.process_time())


def _open(pypdf: Any, file: BinaryIO, password: str | None, seconds: float) -> tuple[Any, int]:
    """The reader, decrypted, and how many pages there are."""
    with _alarm(seconds):
        reader = _decrypted(pypdf, file, password)
        return reader, len(reader.pages)


def _decrypted(pypdf: Any, file: BinaryIO, password: str | None) -> Any:
    """The empty user password is tried before anyone is asked."""
    reader = pypdf.PdfReader(file)
    if not reader.is_encrypted:
        return reader
    try:
        opened = any(reader.decrypt(word) for word in ("", password) if word is not None)
    except pypdf.errors.DependencyError:
        raise _Failure("dependency", "") from None
    if not opened:
        raise _Failure("password" if password is None else "wrong-password", "")
    return reader


def _selected(request: dict[str, Any], total: int) -> list[int]:
    """Physical page numbers to read, 1-based. The parent checked their form; only now is the range known."""
    wanted: list[list[int]] | None = request["ranges"]
    if total == 0:
        raise _Failure("no-pages", "")
    if wanted is None:
        numbers = list(range(1, total + 1)) if total <= request["max_pages"] else []
        count = total
    else:
        if any(first < 1 or last > total for first, last in wanted):
            raise _Failure("range", str(total))
        count = sum(last - first + 1 for first, last in wanted)
        numbers = (
            sorted({number for first, last in wanted for number in range(first, last + 1)})
            if count <= 10 * request["max_pages"]
            else []
        )
        count = len(numbers) or count
    if count > request["max_pages"]:
        raise _Failure("too-many-pages", str(count))
    return numbers


def _labels(reader: Any, total: int, seconds: float, output: BinaryIO) -> list[str]:
    """One printed label per page; the physical numbers where labels are missing, damaged or repeated."""
    numbers = [str(number) for number in range(1, total + 1)]
    try:
        with _alarm(seconds):
            labels = [_tidy_label(label) for label in reader.page_labels]
    except (Exception, _PageTimeout) as error:
        _warn(output, f"page labels cannot be read ({_one_line(error)}); pages are numbered 1-{total}")
        return numbers
    if len(labels) != total or "" in labels or len(set(labels)) != total:
        # [p. 1] must name one page only, or a citation opens the wrong one.
        _warn(output, f"page labels are missing or repeated; pages are numbered 1-{total}")
        return numbers
    return labels


def _tidy_label(label: str) -> str:
    """A label short and plain enough to stand inside ``[p. ...]``."""
    plain = re.sub(r"[\[\](){}<>|,;]", "", strip_controls(label))
    return _WORD_BOUNDARY.sub(" ", plain).strip()[:_MAX_LABEL].strip()


class _Pages:
    """Reads pages one after another, and afterwards those again that could not be read at the first try.

    Args:
        reader: pypdf's.
        labels: one per page of the document.
        request: what the parent asked for.
        output: where messages go.
    """

    def __init__(self, reader: Any, labels: list[str], request: dict[str, Any], output: BinaryIO) -> None:
        self._reader, self._labels, self._request, self._output = reader, labels, request, output
        self._characters = 0
        self._fields_seen: set[str] = set()
        self._last: int | None = None
        self._beside: dict[int, tuple[list[str], list[str]]] = {}  # notes and fields of a page
        self._slow: list[int] = []
        self._unread: list[int] = []

    def read(self, numbers: list[int]) -> None:
        """Send these pages; none may take longer than ``page_seconds``, so that each gets its turn."""
        self._last = numbers[-1] if self._request["ranges"] is None else None
        for number in numbers:
            self._send(number, *self._read_one(number, float(self._request["page_seconds"])))

    def read_again(self) -> None:
        """Read what is left with pypdfium2 where it is installed, then slow pages with all the time there is.

        pypdfium2 is C++ code: it runs after every page has left the process once, so that a crash costs nothing.
        """
        left = self._read_with_pdfium(sorted({*self._slow, *self._unread}))
        waiting = [number for number in self._slow if number in left]
        for at, number in enumerate(waiting):
            seconds = _time_left(self._request) / (len(waiting) - at)
            self._send(number, *self._read_one(number, seconds), last=True)

    def _read_with_pdfium(self, numbers: list[int]) -> list[int]:
        """The pages that stay unread."""
        left = list(numbers)
        with _pdfium(self._request) as document:
            for number in numbers if document else []:
                with contextlib.suppress(Exception):
                    text, problem = _judged(_pdfium_text(document, number), self._output, number)
                    if problem is None:
                        text = _together(text, *self._beside.get(number, ([], [])))
                        self._send(number, text, None, last=True)
                        _warn(self._output, "read with pypdfium2, pypdf could not", number)
                    if problem is None or "no text layer" in problem:
                        left.remove(number)
        return left

    def _read_one(self, number: int, seconds: float) -> tuple[str, str | None]:
        try:
            with _alarm(seconds):
                return self._text_and_problem(number)
        except _PageTimeout:
            return "", f"not read within {seconds:.3g} s of CPU time; {_QUICKER}"
        except MemoryError:
            return "", "needs too much memory"
        except Exception as error:  # pypdf raises far more than PyPdfError on damaged pages
            return "", f"cannot be read ({_one_line(error)})"

    def _text_and_problem(self, number: int) -> tuple[str, str | None]:
        page, ink = self._reader.pages[number - 1], Ink()
        notes, fields = self._beside[number] = self._notes_and_fields(page, number)
        visitors = {"visitor_operand_before": ink.before, "visitor_text": ink.text} if _draws_text(page) else {}
        text, problem = _judged(_figures_forward(page.extract_text(**visitors)), self._output, number)
        if any(annotations_of(page, "/Text")):
            _warn(self._output, "comments ignored", number)
        if ink.doubled:
            _warn(self._output, "text drawn twice in one place is counted once", number)
        if fields:  # now that the captions of buttons are known
            notes, fields = self._notes_and_fields(page, number, ink)
        whole = _together(text, notes, fields)
        return whole, None if whole and problem and "no text layer" in problem else problem

    def _notes_and_fields(self, page: Any, number: int, ink: Ink | None = None) -> tuple[list[str], list[str]]:
        fields = page_fields(page, self._fields_seen, ink.placed if ink else [])
        if number == self._last:
            with contextlib.suppress(Exception):
                fields += fields_without_page(self._reader.trailer["/Root"]["/AcroForm"], self._fields_seen)
        return typed_notes(page), fields

    def _send(self, number: int, text: str, problem: str | None, *, last: bool = False) -> None:
        """One page; ``later`` tells the parent that it is tried again."""
        text, problem = _within_page_limit(text, problem, int(self._request["max_page_characters"]))
        self._characters += len(text)
        if self._characters > self._request["max_characters"]:
            raise _Failure("too-much-text", str(number))
        slow = not last and problem is not None and problem.startswith("not read within")
        if slow:
            self._slow.append(number)
        elif problem is not None:
            self._unread.append(number)
        label = self._labels[number - 1]
        _send(self._output, kind="page", number=number, label=label, text=text, problem=problem, later=slow)


def _draws_text(page: Any) -> bool:
    """Whether a page may have text; a drawing without any need not be taken apart."""
    contents = page.get_contents()
    return contents is not None and _TEXT_OPERATOR.search(contents.get_data()) is not None


def _together(text: str, notes: list[str], fields: list[str]) -> str:
    form = ["\n".join(["Form fields:", *fields])] if fields else []
    return "\n\n".join(filter(None, ["\n".join(filter(None, [text, *notes])), *form]))


def _within_page_limit(text: str, problem: str | None, limit: int) -> tuple[str, str | None]:
    if len(text) <= limit:
        return text, problem
    return "", f"has {len(text):,} characters, more than the {limit:,} allowed"


def _judged(raw: str, output: BinaryIO, number: int) -> tuple[str, str | None]:
    text = clean_text(raw)
    # Non-characters are stripped by the clean-up, so both are asked: the raw text and what is left.
    problem = find_problem(raw) or find_problem(text)
    if problem is None and not text.strip():
        problem = "no text layer (scan?)"
    if problem is None and unreadable_share(raw) >= PARTLY_UNREADABLE_SHARE:
        _warn(output, "some characters may be unreadable; kept", number)
    return text, problem


def _send_notes(reader: Any, output: BinaryIO, seconds: float) -> None:
    """What the document holds besides pages: attachments and XFA forms, both said, neither opened."""
    try:
        with _alarm(seconds):
            names = _attachment_names(reader)
            if names:
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                _warn(output, f"{len(names)} attachment{'s' * (len(names) > 1)} ({shown}) ignored")
            form = reader.trailer["/Root"].get("/AcroForm")
            form = form.get_object() if form is not None else None
            if form is not None and "/XFA" in form:
                _warn(output, "XFA form: only a placeholder is readable; print it to PDF to get its content")
    except (Exception, _PageTimeout) as error:
        _warn(output, f"attachments and forms cannot be listed ({_one_line(error)})")


def _attachment_names(reader: Any) -> list[str]:
    names = [safe_name(str(name)) for name in reader.attachments]
    return names if len(names) < 1000 else names[:1000]


def safe_name(name: str) -> str:
    """A file name fit for a message: last path part only, no control characters, at most 60 characters."""
    last = re.split(r"[/\\]", strip_controls(name).replace("\n", " "))[-1]
    return re.sub(r"[<>|`\"']", "", last).strip()[:60] or "unnamed"


# --- the other reader --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _pdfium(request: dict[str, Any]) -> Iterator[Any]:
    """The document in pypdfium2, or None where that is not installed or cannot open it."""
    document = None
    with contextlib.suppress(Exception):
        import pypdfium2

        document = pypdfium2.PdfDocument(request["path"], password=request["password"] or "")
    yield document


def _pdfium_text(document: Any, number: int) -> str:
    return str(document[number - 1].get_textpage().get_text_bounded())


def _read_with_pdfium(request: dict[str, Any], output: BinaryIO) -> bool:
    """The whole document, where pypdf takes too long to open it; False where pypdfium2 cannot either."""
    with _pdfium(request) as document:
        if document is None:
            return False
        total = len(document)
        selected = _selected(request, total)
        _send(output, kind="start", pages=total, selected=len(selected))
        _warn(
            output, "read with pypdfium2, since pypdf is slow with it; form fields and attachments were not looked for"
        )
        for number in selected:
            try:
                text, problem = _judged(_pdfium_text(document, number), output, number)
            except Exception as error:
                text, problem = "", f"cannot be read ({_one_line(error)})"
            text, problem = _within_page_limit(text, problem, int(request["max_page_characters"]))
            _send(output, kind="page", number=number, label=str(number), text=text, problem=problem, later=False)
    _send(output, kind="end")
    _send(output, kind="closed")
    return True


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise ``_PageTimeout`` in the block after ``seconds`` of CPU time.

    pypdf is Python code, so a signal can stop it. CPU time, because a busy machine is not the page's fault;
    the parent has the wall deadline.
    """
    if not hasattr(signal, "setitimer"):  # Windows: the parent's deadline stops the process instead
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _PageTimeout(f"not done within {seconds:g} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _warn(output: BinaryIO, text: str, page: int | None = None) -> None:
    """Say what is missing or odd; the parent gathers equal warnings about several pages."""
    _send(output, kind="warning", text=text, page=page)


def _send(output: BinaryIO, **message: Any) -> None:
    data = json.dumps(message, ensure_ascii=True).encode("ascii")
    output.write(_HEADER.pack(len(data)) + data)
    output.flush()


def _one_line(error: BaseException) -> str:
    text = _WORD_BOUNDARY.sub(" ", strip_controls(str(error))).strip() or type(error).__name__
    return text[:160]


if __name__ == "__main__":
    sys.exit(main())
