"""Documents that stay read: the engine's document session, behind the few calls that the app needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer, TideKV
    from tidekv_llm.engine import Session as DocumentSession

History = Sequence[tuple[str, str]]
# Only these run one layer at a time, so that a layer's stored keys and values can take the prefix's place.
WITH_STORE = ("tidekv", "tidekv-no-evict", "post-prefill")


class Reader:
    """One conversation about fixed documents with fixed settings.

    Args:
        engine: closed together with the reader.
        documents: the pages of the prompt.
        key: what it was made from; another key needs another reader.
    """

    def __init__(self, engine: TideKV, documents: Sequence[Document], key: tuple[Any, ...]) -> None:
        self.key = key
        self._engine, self._documents = engine, tuple(documents)
        self._session: DocumentSession | None = None

    @property
    def store_bytes(self) -> int:
        """Bytes of the stored prefix."""
        return 0 if self._session is None else int(self._session.store_bytes)

    def ask(self, question: str, history: History, **options: Any) -> Answer:
        """Answer, reusing what was read for an earlier question."""
        session = self._open()
        if session is None:
            return self._engine.ask(self._documents, question, history=history, **options)
        session.history = history  # the page's history counts: stopped questions are not in it
        return session.ask(question, **options)

    def _open(self) -> DocumentSession | None:
        if self._session is None and self._engine.config.schedule in WITH_STORE:
            self._session = self._engine.open(self._documents, store="memory")
        return self._session

    def close(self) -> None:
        """Free the store."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._engine.close()
