"""From uploaded files to documents: checked, copied to the visit's own folder, read in a limited process."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tidekv_apps.jobs import BusyError, Job
from tidekv_apps.records import Entry
from tidekv_apps.security import check_upload_path, plain_error, safe_name
from tidekv_apps.settings import Limits
from tidekv_apps.visits import Visit
from tidekv_llm.documents import Document, PdfLimits
from tidekv_llm.documents.kinds import MAGIC_WINDOW, passes_for_pdf
from tidekv_llm.errors import Cancelled, DocumentError, EncryptedDocumentError, TideKVError

PdfProgress = Callable[[int, int], None]


def pdf_limits(limits: Limits) -> PdfLimits:
    """What one PDF may cost in this app."""
    return PdfLimits(
        memory_bytes=limits.parse_memory_bytes,
        cpu_seconds=limits.parse_seconds,
        wall_seconds=float(limits.parse_seconds),
        max_pages=limits.pages,
        max_characters=limits.characters,
        max_file_bytes=limits.file_bytes,
    )


class Ingest:
    """Reads what a user uploaded.

    Args:
        visit: whose.
        uploads: Gradio's upload folder.
        limits: sizes.
    """

    def __init__(self, visit: Visit, uploads: Path, limits: Limits) -> None:
        self._visit, self._uploads, self._limits = visit, uploads, limits

    def admit(self, paths: Sequence[str]) -> list[Entry]:
        """Check and copy the files, and list them; nothing is read yet.

        Raises:
            DocumentError: a file that was not uploaded, or too many or too large ones. Nothing is kept then, the
                earlier documents neither: no answer may come from a file other than the one just chosen.
        """
        try:
            return self._admit(paths)
        except TideKVError:
            self._park_all()
            raise

    def _admit(self, paths: Sequence[str]) -> list[Entry]:
        visit, limits = self._visit, self._limits
        real = [check_upload_path(path, self._uploads) for path in paths]
        if not real:
            raise DocumentError("no file was chosen; choose a PDF, text or Markdown file")
        if len(visit.entries) + len(real) > limits.files:
            raise DocumentError(f"a conversation takes {limits.files} files; remove some first")
        sizes = [file.stat().st_size for file in real]
        if max(sizes) > limits.file_bytes:
            raise DocumentError(f"a file may have {limits.file_bytes >> 20} MiB; split the larger one")
        held = sum(entry.path.stat().st_size for entry in visit.entries if entry.path.exists())
        if held + sum(sizes) > limits.visit_bytes:
            raise DocumentError(f"all files together may have {limits.visit_bytes >> 20} MiB; remove some first")
        entries = [self._copy(file) for file in real]
        fresh = _without_doubles(visit, entries)
        with visit.lock:
            visit.entries += fresh
        if not fresh:
            visit.notice = "That file is listed already; it was not read twice."
        return fresh

    def _copy(self, file: Path) -> Entry:
        """Into the visit's own folder, under its hash: the uploaded name never names a file."""
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        target = self._visit.folder / digest
        if not target.exists():
            shutil.copyfile(file, target)
            target.chmod(0o600)
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder that it had for itself
            file.parent.rmdir()
        return Entry(name=safe_name(file.name), path=target, digest=digest)

    def read(self, entries: Sequence[Entry], job: Job) -> None:
        """Read the files one after another; each ends as ready, locked or failed.

        If none can be read, the documents from before leave the conversation (they can be brought back).
        """
        for entry in entries:
            self.read_one(entry, job)
        visit = self._visit
        with visit.lock:
            visit.viewer = None
            if entries and all(entry.state == "failed" for entry in entries):
                self._park(others=[entry for entry in visit.entries if entry not in entries])

    def read_one(self, entry: Entry, job: Job, password: str | None = None) -> None:
        """Read one file, counting its pages on the way."""
        entry.state, entry.error, entry.done, entry.total = "reading", "", 0, 0

        def progress(done: int, total: int) -> None:
            if job.cancel.is_set():
                raise Cancelled("reading was stopped")
            entry.done, entry.total = done, total
            job.show("Reading", f"{entry.name}: page {done} of {total}", done / max(total, 1))

        job.show("Reading", entry.name)
        try:
            document = self._parse(entry, password, progress)
        except EncryptedDocumentError as error:
            entry.state = "locked"
            entry.error = "" if password is None else str(error).replace(entry.digest, entry.name)
        except Exception as error:
            entry.state, entry.error = "failed", plain_error(error).replace(entry.digest, entry.name)
        else:
            entry.document, entry.password, entry.state = document, password, "ready"

    def _parse(self, entry: Entry, password: str | None, progress: PdfProgress) -> Document:
        with entry.path.open("rb") as stream:
            head = stream.read(MAGIC_WINDOW)
        if passes_for_pdf(head, entry.name):
            limits = pdf_limits(self._limits)
            read = Document.from_pdf(entry.path, password=password, progress=progress, limits=limits)
        else:
            if entry.path.stat().st_size > self._limits.characters:
                raise DocumentError(f"a text file may have {self._limits.characters:,} bytes; split it")
            read = Document.from_file(entry.path)
        warnings = tuple(warning.replace(entry.digest, entry.name) for warning in read.warnings)
        return Document(entry.name, read.pages, warnings)

    def unlock(self, key: str, password: str, job: Job) -> None:
        """Try a password."""
        entry = self._visit.entry(key)
        if entry.state != "locked":
            raise DocumentError(f"{entry.name} needs no password")
        self.read_one(entry, job, password[:256])

    def _park_all(self) -> None:
        with self._visit.lock:
            self._park(list(self._visit.entries))

    def _park(self, others: Sequence[Entry]) -> None:
        """Take documents out of the conversation, so that no answer comes from them by mistake."""
        visit = self._visit
        ready = [entry for entry in others if entry.state == "ready"]
        visit.entries = [entry for entry in visit.entries if entry not in others]
        visit.parked = ready or visit.parked
        visit.drop_reader()


def restore(visit: Visit) -> None:
    """Bring back the documents that a failed upload had put aside."""
    with visit.lock:
        visit.entries = [*visit.parked, *(entry for entry in visit.entries if entry.state != "failed")]
        visit.parked = []


def remove(visit: Visit, key: str) -> None:
    """Take one file out, and delete its copy if no other entry has the same content."""
    with visit.lock:
        entry = visit.entry(key)
        visit.entries.remove(entry)
        if not any(other.digest == entry.digest for other in (*visit.entries, *visit.parked)):
            entry.path.unlink(missing_ok=True)
        visit.viewer = None
    visit.drop_reader()


def move(visit: Visit, key: str, step: int) -> None:
    """Move one file up (-1) or down (1) in the prompt."""
    with visit.lock:
        at = visit.entries.index(visit.entry(key))
        to = min(max(at + step, 0), len(visit.entries) - 1)
        visit.entries.insert(to, visit.entries.pop(at))


def set_pages(visit: Visit, key: str, pages: str) -> None:
    """Send only these pages of a file; empty for all.

    Raises:
        ConfigError: not a selection, or beyond the last page.
        BusyError: the file is not read yet.
    """
    entry = visit.entry(key)
    if entry.document is None:
        raise BusyError(f"{entry.name} is not read yet")
    wanted = pages.strip()[:500]
    if wanted:
        entry.document.select(wanted)
    entry.pages = wanted


def _without_doubles(visit: Visit, entries: Sequence[Entry]) -> list[Entry]:
    """Same content under the same name is the same file; a failed or locked one is tried again."""
    known = {(entry.digest, entry.name) for entry in visit.entries if entry.state in ("ready", "reading")}
    visit.entries = [e for e in visit.entries if not any(e.digest == n.digest for n in entries) or e.state == "ready"]
    fresh: list[Entry] = []
    for entry in entries:
        if (entry.digest, entry.name) not in known:
            known.add((entry.digest, entry.name))
            fresh.append(entry)
    return fresh
