"""What a visit holds: its files, its questions with their answers, and the runs they were compared with."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tidekv_apps.settings import AskSettings

if TYPE_CHECKING:
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer

EntryState = Literal["reading", "ready", "locked", "failed"]


@dataclass
class Entry:
    """One file of a visit.

    Attributes:
        key: names it in the page.
        name: as uploaded, made safe to show.
        path: the visit's own copy.
        digest: SHA-256 of the bytes.
        state: being read, ready, waiting for its password, or failed.
        waiting: what keeps its reading from beginning.
        document: all its pages.
        pages: selection such as "1-3,7"; empty for all.
        error: why it failed, or what the password prompt says.
        done: pages read so far.
        total: pages in all.
        password: kept for page previews.
    """

    name: str
    path: Path
    digest: str
    key: str = field(default_factory=lambda: secrets.token_hex(4))
    state: EntryState = "reading"
    document: Document | None = None
    pages: str = ""
    error: str = ""
    waiting: str = ""
    done: int = 0
    total: int = 0
    password: str | None = None

    @property
    def page_count(self) -> int:
        """All pages of the file."""
        return len(self.document.pages) if self.document is not None else 0

    @cached_property
    def readable_pages(self) -> int:
        """Pages with text; asked for once the file is read."""
        return sum(page.readable for page in self.document.pages) if self.document is not None else 0

    def selected(self) -> Document | None:
        """The pages that go into the prompt."""
        if self.document is None:
            return None
        return self.document.select(self.pages) if self.pages else self.document


@dataclass
class Comparison:
    """A real run of another schedule on the same prompt."""

    schedule: str
    components: dict[str, int]
    construction_peak_bytes: int
    transient_bytes: int
    ttft_seconds: float


@dataclass
class Turn:
    """One question and what came of it."""

    question: str
    documents: tuple[Document, ...]
    entry_keys: tuple[str, ...]
    sent: str
    model: str
    key: str = field(default_factory=lambda: secrets.token_hex(4))
    text: str = ""
    state: Literal["running", "done", "stopped", "failed"] = "running"
    error: str = ""
    answer: Answer | None = None
    settings: AskSettings | None = None
    predictions: dict[str, dict[str, int]] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    document_changed: bool = False
