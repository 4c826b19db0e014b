"""The questions and answers of a named session, kept next to its documents for the next command."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidekv_llm.errors import CacheError

_FILE = "conversation.json"


@dataclass
class Conversation:
    """Turns about certain documents.

    Attributes:
        fingerprint: of the documents; a conversation about others is not continued.
        turns: (question, answer) pairs, oldest first.
    """

    fingerprint: str
    turns: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, fingerprint: str) -> Conversation:
        """What the folder holds about these documents; an empty one if that is nothing, or damaged."""
        try:
            found = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            turns = [(str(question), str(answer)) for question, answer in found["turns"]]
            same = found["fingerprint"] == fingerprint
        except (OSError, ValueError, KeyError, TypeError):
            return cls(fingerprint)
        return cls(fingerprint, turns if same else [])

    def save(self, folder: Path) -> None:
        """Write it for this user alone, under a temporary name first.

        Raises:
            CacheError: the file cannot be written.
        """
        partial = folder / f"{_FILE}.{os.getpid()}"
        try:
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump({"fingerprint": self.fingerprint, "turns": self.turns}, stream, ensure_ascii=False)
            partial.chmod(0o600)
            partial.replace(folder / _FILE)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise CacheError(f"the conversation could not be stored ({error.strerror}); free disk space") from error
