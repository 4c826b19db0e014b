"""Where a quotation stands in a page's text, whatever happened to spaces, hyphens and quotation marks."""

from __future__ import annotations

from tidekv_llm.documents.words import letters


def find_quote(text: str, quote: str) -> tuple[int, int] | None:
    """First and last-plus-one character of ``quote`` in ``text``; None if its letters do not stand there."""
    folded, places = letters(text)
    wanted, _ = letters(quote)
    at = folded.find(wanted) if wanted else -1
    if at < 0:
        return None
    return places[at], places[at + len(wanted) - 1] + 1
