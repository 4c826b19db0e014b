"""Which pages have most to do with a question: BM25 over words, for corpora that do not fit the window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidekv_llm.documents.words import words
from tidekv_llm.errors import ConfigError


def bm25_order(question: str, texts: Sequence[str]) -> list[int]:
    """Indices of the texts, best first; equal scores keep the reading order.

    Raises:
        ConfigError: bm25s is not installed.
    """
    query = words(question)
    pages = [words(text) for text in texts]
    if not query or not any(pages):
        return list(range(len(texts)))
    retriever = _bm25()
    retriever.index(pages, show_progress=False)
    scores = retriever.get_scores(query)
    return sorted(range(len(texts)), key=lambda index: (-float(scores[index]), index))


def _bm25() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ConfigError(
            'overflow="retrieve" ranks pages with bm25s; run pip install bm25s, or give a retriever'
        ) from None
    return bm25s.BM25()
