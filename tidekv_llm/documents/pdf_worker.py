"""The child process that parses a PDF: hostile input is met here, under limits, never in the caller.

Run as ``python -m tidekv_llm.documents.pdf_worker``; ``pdf.py`` is its only caller. One JSON request comes on
standard input, framed JSON messages leave on standard output (four bytes big-endian length, then UTF-8):

    {"kind": "start", "pages": 12, "selected": 3}        the document is open
    {"kind": "page", "number": 7, "label": "vii", "text": "...", "problem": null}
    {"kind": "warning", "text": "...", "page": 7 or null}
    {"kind": "failed", "reason": "password" | "limit" | ..., "text": "..."}   nothing follows
    {"kind": "end"}                                      all pages were sent; a second try may follow
    {"kind": "closed"}

The worker imports pypdf and the standard library only. It writes no file: the process limits forbid it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import struct
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, BinaryIO

from tidekv_llm.documents.cleanup import clean_text, strip_controls
from tidekv_llm.documents.readable import PARTLY_UNREADABLE_SHARE, find_problem, unreadable_share

_HEADER = struct.Struct(">I")
_MAX_LABEL = 16
_MAX_FIELD_NAME = 200
_MAX_FIELDS_PER_PAGE = 2000
_MAX_PARENTS = 32
_PASSWORD_FIELD = 1 << 13
_WORD_BOUNDARY = re.compile(r"\s+")


class _PageTimeout(BaseException):
    """Raised by the alarm; a BaseException so that pypdf's own ``except Exception`` cannot swallow it."""


class _Failure(Exception):
    """The whole document cannot be read: ``reason`` is one of the words that ``pdf.py`` knows."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def main() -> int:
    """Read the request, limit the process, stream the pages."""
    request: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    output = sys.stdout.buffer
    _limit_process(int(request["memory_bytes"]), int(request["cpu_seconds"]))
    logging.disable(logging.CRITICAL)  # pypdf logs every oddity it mends; the pages are what counts
    try:
        _read_document(request, output)
    except _Failure as failure:
        _send(output, kind="failed", reason=failure.reason, text=str(failure))
    except MemoryError:
        _send(output, kind="failed", reason="memory", text="")
    except _PageTimeout:
        _send(output, kind="failed", reason="time", text="")
    except RecursionError:
        _send(output, kind="failed", reason="damaged", text="its objects are nested too deeply")
    except Exception as error:  # any parser bug on hostile input ends as one plain message
        _send(output, kind="failed", reason="damaged", text=_one_line(error))
    return 0


def _limit_process(memory_bytes: int, cpu_seconds: int) -> None:
    """Address space, CPU time, no files, no core dump; where the platform has such limits."""
    try:
        import resource
    except ImportError:  # Windows: the wall deadline of the parent still holds
        return
    for name, value in (
        ("RLIMIT_AS", memory_bytes),
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_CORE", 0),
    ):
        kind = getattr(resource, name, None)
        if kind is not None:
            with contextlib.suppress(ValueError, OSError):  # macOS refuses RLIMIT_AS; a lower hard limit stays
                resource.setrlimit(kind, (value, value))


def _read_document(request: dict[str, Any], output: BinaryIO) -> None:
    import pypdf

    limits: dict[str, Any] = {
        "page_tree_maximum_entries": int(request["max_tree_entries"]),
        "jbig2dec_binary": None,  # images are not read, and no other program is started
    }
    with open(request["path"], "rb") as file, pypdf.apply_configuration(**limits):
        reader = _open(pypdf, file, request["password"], float(request["page_seconds"]))
        with _alarm(float(request["page_seconds"])):
            total = len(reader.pages)
        selected = _selected(request, total)
        _send(output, kind="start", pages=total, selected=len(selected))
        labels = _labels(reader, total, float(request["page_seconds"]), output)
        retry = _send_pages(reader, selected, labels, request, output)
        _send_notes(reader, output, float(request["page_seconds"]))
        _send(output, kind="end")
    _second_try(request, retry, labels, output)
    _send(output, kind="closed")


def _open(pypdf: Any, file: BinaryIO, password: str | None, seconds: float) -> Any:
    """The reader, decrypted; the empty user password is tried before anyone is asked."""
    with _alarm(seconds):
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


def _send_pages(
    reader: Any, selected: list[int], labels: list[str], request: dict[str, Any], output: BinaryIO
) -> list[int]:
    """Send every selected page; returns the numbers of those that a second engine should look at."""
    retry: list[int] = []
    characters = 0
    seen_fields: set[str] = set()
    for number in selected:
        last = number == selected[-1] and request["ranges"] is None
        try:
            with _alarm(float(request["page_seconds"])):
                page = reader.pages[number - 1]
                text, problem = _page_text(page, output, number)
                fields = _page_fields(page, seen_fields)
                if last:
                    fields += _fields_without_page(reader, seen_fields)
            if fields:
                text = f"{text}\n\nForm fields:\n" + "\n".join(fields) if text else "Form fields:\n" + "\n".join(fields)
                problem = None if problem and "no text layer" in problem else problem
        except _PageTimeout:
            text, problem = "", f"not read within {request['page_seconds']:g} s"
        except MemoryError:
            text, problem = "", "needs too much memory"
        except Exception as error:  # pypdf raises far more than PyPdfError on damaged pages
            text, problem = "", f"cannot be read ({_one_line(error)})"
        if len(text) > request["max_page_characters"]:
            text, problem = (
                "",
                f"has {len(text):,} characters, more than the {request['max_page_characters']:,} allowed",
            )
        characters += len(text)
        if characters > request["max_characters"]:
            raise _Failure("too-much-text", str(number))
        if problem is not None:
            retry.append(number)
        _send(output, kind="page", number=number, label=labels[number - 1], text=text, problem=problem)
    return retry


def _page_text(page: Any, output: BinaryIO, number: int) -> tuple[str, str | None]:
    """Cleaned text and what is wrong with it."""
    raw = page.extract_text()
    notes = sum(1 for annotation in _annotations(page) if annotation.get("/Subtype") in ("/FreeText", "/Text"))
    if notes:
        _warn(output, "comments ignored", number)
    return _judged(raw, output, number)


def _judged(raw: str, output: BinaryIO, number: int) -> tuple[str, str | None]:
    text = clean_text(raw)
    # Non-characters are stripped by the clean-up, so both are asked: the raw text and what is left.
    problem = find_problem(raw) or find_problem(text)
    if problem is None and not text.strip():
        problem = "no text layer (scan?)"
    if problem is None and unreadable_share(raw) >= PARTLY_UNREADABLE_SHARE:
        _warn(output, "some characters may be unreadable; kept", number)
    return text, problem


def _annotations(page: Any) -> Iterator[Any]:
    for index, reference in enumerate(page.get("/Annots") or ()):
        if index >= _MAX_FIELDS_PER_PAGE:
            return
        with contextlib.suppress(Exception):  # a broken annotation must not cost the page its text
            annotation = reference.get_object()
            if hasattr(annotation, "get"):
                yield annotation


def _page_fields(page: Any, seen: set[str]) -> list[str]:
    """``name: value`` for each filled form field with a widget on this page; ``extract_text`` omits them."""
    lines = []
    for widget in _annotations(page):
        if widget.get("/Subtype") != "/Widget":
            continue
        with contextlib.suppress(Exception):
            name, value = _field(widget)
            if name in seen:  # radio buttons: one widget per choice, one value
                continue
            seen.add(name)
            if value:
                lines.append(f"{name}: {value}")
    return lines


def _field(widget: Any) -> tuple[str, str]:
    """Full name and printable value of a field; type, flags and value may sit on a parent."""
    names: list[str] = []
    found: dict[str, Any] = {}
    node = widget
    for _ in range(_MAX_PARENTS):
        if "/T" in node:
            names.insert(0, str(node["/T"]))
        for key in ("/V", "/Ff", "/FT"):
            if key in node:
                found.setdefault(key, node[key])
        if "/Parent" not in node:
            break
        node = node["/Parent"].get_object()
    name = _WORD_BOUNDARY.sub(" ", clean_text(".".join(names)))[:_MAX_FIELD_NAME] or "field"
    if int(found.get("/Ff", 0)) & _PASSWORD_FIELD and found.get("/FT") == "/Tx":
        return name, "(hidden)"
    return name, _field_value(found.get("/V"))


def _field_value(value: Any) -> str:
    if value is None or value == "/Off":
        return ""
    if hasattr(value, "get_data"):
        return clean_text(value.get_data().decode("utf-8", "replace"))
    if isinstance(value, list):
        return ", ".join(filter(None, map(_field_value, value)))
    text = str(value)
    return clean_text(text.removeprefix("/") if type(value).__name__ == "NameObject" else text)


def _fields_without_page(reader: Any, seen: set[str]) -> list[str]:
    """Filled fields that no page shows: they come with the last page rather than not at all."""
    lines = []
    with contextlib.suppress(Exception):
        for key, field in (reader.get_fields() or {}).items():
            name, value = clean_text(str(key))[:_MAX_FIELD_NAME], _field_value(field.get("/V"))
            # get_fields() renames doubles ("Name", "Name_2"); those were seen on their page.
            if value and "/Kids" not in field and re.sub(r"_\d+$", "", name) not in seen and name not in seen:
                lines.append(f"{name}: {value}")
    return lines


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


def _second_try(request: dict[str, Any], numbers: list[int], labels: list[str], output: BinaryIO) -> None:
    """Pages that pypdf could not read, with pypdfium2 where it is installed.

    It is C++ code, so it runs after every pypdf page has left the process: a crash costs nothing.
    """
    if not numbers:
        return
    try:
        import pypdfium2
    except Exception:
        return
    with contextlib.suppress(Exception):
        document = pypdfium2.PdfDocument(request["path"], password=request["password"] or "")
        for number in numbers:
            text, problem = _judged(document[number - 1].get_textpage().get_text_bounded(), output, number)
            if problem is None and len(text) <= request["max_page_characters"]:
                _send(output, kind="page", number=number, label=labels[number - 1], text=text, problem=None)
                _warn(output, "read with pypdfium2, pypdf could not", number)


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
