"""Where a quotation stands in a page's text, whatever happened to spaces, hyphens and quotation marks."""

from __future__ import annotations

import unicodedata


def find_quote(text: str, quote: str) -> tuple[int, int] | None:
    """First and last-plus-one character of ``quote`` in ``text``; None if its letters do not stand there."""
    letters, places = _fold(text)
    wanted, _ = _fold(quote)
    at = letters.find(wanted) if wanted else -1
    if at < 0:
        return None
    return places[at], places[at + len(wanted) - 1] + 1


def _fold(text: str) -> tuple[str, list[int]]:
    """Letters and digits only, and for each the place of the character it came from."""
    letters: list[str] = []
    places: list[int] = []
    for place, character in enumerate(text):
        for folded in unicodedata.normalize("NFKC", character).casefold():
            if folded.isalnum():
                letters.append(folded)
                places.append(place)
    return "".join(letters), places
