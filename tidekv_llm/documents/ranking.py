"""Which pages have most to do with a question: BM25 over words, for corpora that do not fit the window."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tidekv_llm.errors import ConfigError

_WORD = re.compile(r"\w+")
# Scripts without spaces: Han, kana, Thai, Lao, Khmer, Burmese. Pairs of letters stand in for words there.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")


def bm25_order(question: str, texts: Sequence[str]) -> list[int]:
    """Indices of the texts, best first; equal scores keep the reading order.

    Raises:
        ConfigError: bm25s is not installed.
    """
    query = _words(question)
    pages = [_words(text) for text in texts]
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


def _words(text: str) -> list[str]:
    """``"The tank"`` gives the, tank; ``"灯台の高さ"`` gives its pairs 灯台, 台の, の高, 高さ."""
    folded = text.casefold()
    pairs = [run[start : start + 2] for run in _UNSPACED.findall(folded) for start in range(max(1, len(run) - 1))]
    return [*_WORD.findall(_UNSPACED.sub(" ", folded)), *pairs]
