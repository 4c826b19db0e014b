"""The pages that match a question best (BM25), for documents that do not fit the context window."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tidekv_llm.documents import Document
from tidekv_llm.documents.words import words as split_words

K1, B = 1.5, 0.75


@dataclass(frozen=True)
class PageScore:
    """One page of one document, and how well it matches."""

    document: int
    page: int
    score: float


def rank_pages(documents: Sequence[Document], question: str) -> list[PageScore]:
    """All readable pages, best first; equal ones in reading order."""
    pages = [
        (at, page.number, split_words(page.text)) for at, d in enumerate(documents) for page in d.pages if page.readable
    ]
    if not pages:
        return []
    counts = [Counter(words) for _, _, words in pages]
    mean_length = sum(len(words) for _, _, words in pages) / len(pages) or 1.0
    found_on = Counter(word for count in counts for word in count)
    wanted = set(split_words(question))
    scored = []
    for (document, number, words), count in zip(pages, counts, strict=True):
        score = sum(
            _weight(len(pages), found_on[word]) * _saturated(count[word], len(words) / mean_length)
            for word in wanted
            if count[word]
        )
        scored.append(PageScore(document, number, score))
    return sorted(scored, key=lambda page: (-page.score, page.document, page.page))


def choose_pages(
    documents: Sequence[Document], question: str, tokens: dict[tuple[int, int], int], room: int
) -> list[Document]:
    """The documents reduced to the best pages that fit ``room`` tokens, in reading order.

    Args:
        documents: what the user uploaded.
        question: decides.
        tokens: prompt tokens per (document, page).
        room: tokens for all pages together.
    """
    chosen: dict[int, list[int]] = {}
    for page in rank_pages(documents, question):
        cost = tokens.get((page.document, page.page), 0)
        if cost and cost <= room:
            chosen.setdefault(page.document, []).append(page.page)
            room -= cost
    return [documents[at].select(sorted(chosen[at])) for at in sorted(chosen)]


def _weight(pages: int, found_on: int) -> float:
    return math.log(1 + (pages - found_on + 0.5) / (found_on + 0.5))


def _saturated(count: int, relative_length: float) -> float:
    return count * (K1 + 1) / (count + K1 * (1 - B + B * relative_length))
