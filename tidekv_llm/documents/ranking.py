"""Which pages have most to do with a question, by BM25 over words, and which of them fit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidekv_llm.documents.pages import Document
from tidekv_llm.documents.words import words
from tidekv_llm.errors import ConfigError

Place = tuple[int, int]  # index of the document, number of the page


def ranked_pages(documents: Sequence[Document], question: str) -> list[Place]:
    """All readable pages, best first; equal ones in reading order.

    Raises:
        ConfigError: bm25s is not installed.
    """
    pages = [(at, page) for at, document in enumerate(documents) for page in document.pages if page.readable]
    order = bm25_order(question, [page.text for _, page in pages])
    return [(pages[index][0], pages[index][1].number) for index in order]


def fill_room(ranked: Iterable[Place], tokens: Mapping[Place, int], room: int) -> set[Place]:
    """Pages in order of merit as long as there is room; one that is too long makes way for the next.

    Args:
        ranked: best first.
        tokens: prompt tokens of each page; a page that is not named is left out.
        room: tokens for all together.
    """
    kept: set[Place] = set()
    for place in ranked:
        if place in tokens and tokens[place] <= room:
            kept.add(place)
            room -= tokens[place]
    return kept


def only_pages(documents: Sequence[Document], kept: Collection[Place]) -> tuple[Document, ...]:
    """The same documents with the kept pages only, in reading order; one may be left without pages."""
    return tuple(
        replace(document, pages=tuple(page for page in document.pages if (at, page.number) in kept))
        for at, document in enumerate(documents)
    )


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
            "the best pages are found with bm25s; run pip install bm25s, or rank the pages yourself"
        ) from None
    return bm25s.BM25()
