"""Documents that stay read: the engine's session, kept with what it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer, TideKV

History = Sequence[tuple[str, str]]


class Reader:
    """One conversation about fixed documents with fixed settings.

    Args:
        engine: closed together with the reader.
        documents: the pages of the prompt.
        key: what it was made from; another key needs another reader.
    """

    def __init__(self, engine: TideKV, documents: Sequence[Document], key: tuple[Any, ...]) -> None:
        self.key = key
        self._engine = engine
        self._session = engine.open(documents, store="memory")

    @property
    def store_bytes(self) -> int:
        """Bytes of the stored prefix."""
        return self._session.store_bytes

    def ask(self, question: str, history: History, **options: Any) -> Answer:
        """Answer, reusing what was read for an earlier question."""
        self._session.history = history  # the page's history counts: stopped questions are not in it
        return self._session.ask(question, **options)

    def close(self) -> None:
        """Free the store."""
        self._session.close()
        self._engine.close()
