"""The page drawer: one page with its quotation marked, or the extracted text of a whole file."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_apps.panels import left_out, render
from tidekv_apps.preview import PageImage, draw_page
from tidekv_apps.quotes import find_quote
from tidekv_apps.records import Entry, Turn
from tidekv_apps.visits import Visit
from tidekv_llm.documents import Document
from tidekv_llm.errors import ConfigError

PAGES_PER_VIEW = 50
CHARACTERS_PER_PAGE = 20_000


@dataclass(frozen=True)
class Excerpt:
    """The text of a page as far as it is shown: of a text file without pages, which may have megabytes, a part."""

    before: str
    quoted: str
    after: str
    note: str


def excerpt(text: str, found: tuple[int, int] | None = None) -> Excerpt:
    """The text around a quotation, or from its beginning."""
    start, stop = found or (0, 0)
    first = max(0, start - CHARACTERS_PER_PAGE // 2) if len(text) > CHARACTERS_PER_PAGE else 0
    last = min(len(text), first + CHARACTERS_PER_PAGE)
    shown = f"Characters {first + 1:,} to {last:,} of {len(text):,} are shown; the model is given all of them."
    return Excerpt(text[first:start], text[start:stop], text[stop:last], shown if last - first < len(text) else "")


def open_citation(visit: Visit, argument: str) -> None:
    """Show the page of a citation, ``turn:number``."""
    turn, at = _turn_and_number(visit, argument)
    assert turn.answer is not None
    citations = turn.answer.citations
    if at >= len(citations):
        raise ConfigError("that citation is no longer here")
    citation = citations[at]
    _show(visit, turn, citation.document, citation.page, citation.quote)


def open_strip(visit: Visit, argument: str) -> None:
    """Show a page of the strip, ``turn:span``."""
    turn, at = _turn_and_number(visit, argument)
    assert turn.answer is not None
    spans = turn.answer.prompt.spans
    if at >= len(spans):
        raise ConfigError("that page is no longer here")
    _show(visit, turn, spans[at].document, spans[at].page, None)


def _turn_and_number(visit: Visit, argument: str) -> tuple[Turn, int]:
    key, _, number = argument.partition(":")
    turn = next((turn for turn in visit.turns if turn.key == key and turn.answer is not None), None)
    if turn is None or not number.isdecimal():
        raise ConfigError("that answer is no longer here")
    return turn, int(number[:9])


def _show(visit: Visit, turn: Turn, document: int, page: int, quote: str | None) -> None:
    chosen = turn.documents[document]
    entry = next((e for e in visit.entries if e.key == turn.entry_keys[document]), None)
    visit.viewer = page_view(chosen, page, quote, entry)


def open_text(visit: Visit, key: str, tokens: dict[int, int], start: int = 0) -> None:
    """Show what was read from a file, page by page."""
    entry = visit.entry(key)
    if entry.document is None:
        raise ConfigError(f"{entry.name} is not read yet")
    visit.viewer = text_view(entry, tokens, start)


def page_view(document: Document, number: int, quote: str | None, entry: Entry | None) -> str:
    """A page as a picture, if it can be drawn, and as text."""
    page = next((page for page in document.pages if page.number == number), None)
    if page is None:
        raise ConfigError(f"{document.name} has no page {number}")
    found = find_quote(page.text, quote) if quote else None
    label = f" (printed {page.label})" if page.label != str(page.number) else ""
    return render(
        "page.html",
        title=f"{document.name}, page {number}{label}",
        unverified=quote is not None and found is None,
        image=_drawn(entry, number, quote),
        page=page,
        shown=excerpt(page.text, found),
    )


def _drawn(entry: Entry | None, number: int, quote: str | None) -> PageImage | None:
    if entry is None or not entry.path.is_file():
        return None
    return draw_page(entry.path, number, quote=quote, password=entry.password)


def text_view(entry: Entry, tokens: dict[int, int], start: int) -> str:
    """Fifty pages of text at a time, with the counts of each."""
    assert entry.document is not None
    pages = entry.document.pages
    stop = start + PAGES_PER_VIEW
    return render(
        "text.html",
        entry=entry,
        tokens=tokens,
        pages=[(page, excerpt(page.text)) for page in pages[start:stop]],
        left_out=left_out(entry),
        earlier=max(0, start - PAGES_PER_VIEW) if start else None,
        later=stop if stop < len(pages) else None,
    )
