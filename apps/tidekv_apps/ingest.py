"""From uploaded files to documents: checked, copied to the visit's own folder, read in a limited process."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidekv_apps.jobs import Job
from tidekv_apps.lanes import ReadingLanes
from tidekv_apps.records import Entry
from tidekv_apps.security import check_upload_path, plain_error, safe_name
from tidekv_apps.settings import Limits
from tidekv_apps.visits import Visit
from tidekv_llm.documents import Document, PdfLimits
from tidekv_llm.documents.kinds import MAGIC_WINDOW, passes_for_pdf
from tidekv_llm.errors import BusyError, Cancelled, DocumentError, EncryptedDocumentError, TideKVError


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
        lanes: whose file is read next.
    """

    def __init__(self, visit: Visit, uploads: Path, limits: Limits, lanes: ReadingLanes) -> None:
        self._visit, self._uploads, self._limits, self._lanes = visit, uploads, limits, lanes

    def admit(self, paths: Sequence[str], job: Job) -> list[Entry]:
        """Check the files, take them into the visit's folder, and list them; nothing is read yet.

        Raises:
            Cancelled: the job was, and the visit is cleared or closed by now.
            DocumentError: a file that was not uploaded, or too many or too large ones. Nothing is kept then, the
                earlier documents neither: no answer may come from a file other than the one just chosen.
        """
        files: list[Path] = []
        try:
            for path in dict.fromkeys(paths):
                files.append(check_upload_path(path, self._uploads))
            return self._admit(files, job)
        except TideKVError:
            self._park_all()
            raise
        finally:
            for file in files:
                self._drop_upload(file)

    def _admit(self, files: Sequence[Path], job: Job) -> list[Entry]:
        visit = self._visit
        self._check(files)
        digests = [_digest(file) for file in files]
        with visit.lock:
            if job.cancel.is_set():
                raise Cancelled("reading was stopped")
            entries = [self._keep(file, digest) for file, digest in zip(files, digests, strict=True)]
            fresh = _without_doubles(visit, entries)
            visit.entries += fresh
        visit.tidy()
        if not fresh:
            visit.notice = "That file is listed already; it was not read twice."
        return fresh

    def _drop_upload(self, file: Path) -> None:
        """What is left of an upload: the file if it was refused, and the folder that it had for itself."""
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            if file.parent != self._uploads.resolve():
                file.parent.rmdir()

    def _check(self, files: Sequence[Path]) -> None:
        limits = self._limits
        if not files:
            raise DocumentError("no file was chosen; choose a PDF, text or Markdown file")
        if len(self._visit.entries) + len(files) > limits.files:
            raise DocumentError(f"a conversation takes {limits.files} files; remove some first")
        if max(file.stat().st_size for file in files) > limits.file_bytes:
            raise DocumentError(f"a file may have {limits.file_bytes >> 20} MiB; split the larger one")

    def _keep(self, file: Path, digest: str) -> Entry:
        """Into the visit's own folder, under its hash: the uploaded name never names a file."""
        visit, target = self._visit, self._visit.folder / digest
        visit.storage.files.take(visit.holder, digest, file.stat().st_size)
        shutil.move(file, target)
        target.chmod(0o600)
        return Entry(name=safe_name(file.name), path=target, digest=digest)

    def read(self, entries: Sequence[Entry], job: Job) -> None:
        """Read the files, small ones first; each ends as ready, locked or failed.

        If none can be read, the documents from before leave the conversation (they can be brought back).
        """
        for entry in sorted(entries, key=lambda entry: entry.path.stat().st_size):
            self.read_one(entry, job)
        visit = self._visit
        with visit.lock:
            visit.viewer = None
            if entries and all(entry.state == "failed" for entry in entries):
                self._park(others=[entry for entry in visit.entries if entry not in entries])

    def read_one(self, entry: Entry, job: Job, password: str | None = None) -> None:
        """Read one file when its turn comes, counting its pages on the way."""
        entry.state, entry.error, entry.done, entry.total = "reading", "", 0, 0
        entry.waiting = "waiting for its turn"
        job.show("Reading", entry.name)
        size = entry.path.stat().st_size

        def attempt(seconds: float) -> Document:
            entry.waiting, entry.done = "", 0
            job.show("Reading", entry.name)
            return self._parse(entry, password, job, seconds)

        try:
            document = self._lanes.read(self._visit.owner, size, job.cancel, attempt)
            self._take_in(entry, document)
        except EncryptedDocumentError as error:
            entry.state = "locked"
            entry.error = "" if password is None else str(error).replace(entry.digest, entry.name)
        except Exception as error:
            entry.state, entry.error = "failed", plain_error(error).replace(entry.digest, entry.name)
        else:
            entry.password, entry.state = password, "ready"

    def _take_in(self, entry: Entry, document: Document) -> None:
        """Keep the text, if the file is still here and there is room for it."""
        visit = self._visit
        with visit.lock:
            if entry not in visit.entries:
                raise Cancelled("the file was removed")
            size = sum(sys.getsizeof(page.text) for page in document.pages)
            visit.storage.texts.take(visit.holder, entry.key, size)
            entry.document = document

    def _parse(self, entry: Entry, password: str | None, job: Job, seconds: float) -> Document:
        def progress(done: int, total: int) -> None:
            if job.cancel.is_set():
                raise Cancelled("reading was stopped")
            entry.done, entry.total = done, total
            job.show("Reading", f"{entry.name}: page {done} of {total}", done / max(total, 1))

        with entry.path.open("rb") as stream:
            head = stream.read(MAGIC_WINDOW)
        if passes_for_pdf(head, entry.name):
            limits = replace(pdf_limits(self._limits), wall_seconds=seconds)
            read = Document.from_pdf(entry.path, password=password, progress=progress, limits=limits)
        else:
            read = self._parse_text(entry, job)
        warnings = tuple(warning.replace(entry.digest, entry.name) for warning in read.warnings)
        return Document(entry.name, read.pages, warnings)

    def _parse_text(self, entry: Entry, job: Job) -> Document:
        if entry.path.stat().st_size > self._limits.characters:
            raise DocumentError(f"a text file may have {self._limits.characters:,} bytes; split it")
        if job.cancel.is_set():
            raise Cancelled("reading was stopped")
        return Document.from_file(entry.path)

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
        visit.tidy()


def restore(visit: Visit) -> None:
    """Bring back the documents that a failed upload had put aside."""
    with visit.lock:
        visit.entries = [*visit.parked, *(entry for entry in visit.entries if entry.state != "failed")]
        visit.parked = []
    visit.tidy()


def remove(visit: Visit, key: str) -> None:
    """Take one file out, and delete it if no other entry has the same content."""
    with visit.lock:
        visit.entries.remove(visit.entry(key))
        visit.viewer = None
    visit.drop_reader()
    visit.tidy()


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


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        raise DocumentError("that file is no longer here; choose it again") from None


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
