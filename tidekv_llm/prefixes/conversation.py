"""The questions and answers of a named session, kept next to its documents for the next command."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tidekv_llm.errors import CacheError
from tidekv_llm.files import written_then_renamed

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
        facts = json.dumps({"fingerprint": self.fingerprint, "turns": self.turns}, ensure_ascii=False)
        try:
            with written_then_renamed(folder / _FILE) as partial:
                partial.write_text(facts, encoding="utf-8")
        except OSError as error:
            raise CacheError(f"the conversation could not be stored ({error.strerror}); free disk space") from error
