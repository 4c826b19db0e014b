"""Pieces of work, as the page shows them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tidekv_llm.lock import Ticket


@dataclass
class Live:
    """What the running job says about itself."""

    stage: str = ""
    detail: str = ""
    fraction: float | None = None
    text: str = ""


class Job:
    """One piece of model work: a cancel flag, its place in the line, and what the page shows meanwhile."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.finished = threading.Event()
        self.live = Live()
        self.version = 0
        self.ticket: Ticket | None = None

    def show(self, stage: str, detail: str = "", fraction: float | None = None) -> None:
        """Say what is going on."""
        self.live = Live(stage, detail, fraction, self.live.text)
        self.version += 1

    def add_text(self, delta: str) -> None:
        """Add a piece of the answer."""
        self.live = Live("Answering", "", None, self.live.text + delta)
        self.version += 1

    def wait_behind(self, place: int) -> None:
        """Say how many come first."""
        self.show("Waiting", f"{place} before you in the queue")
