"""The page drawer: one page with its quotation marked, or the extracted text of a whole file."""

from __future__ import annotations

from pathlib import Path

from tidekv_apps.panels import button, esc, excluded, extracted_table
from tidekv_apps.preview import PageImage, draw_page
from tidekv_apps.quotes import find_quote
from tidekv_apps.records import Entry, Turn
from tidekv_apps.visits import Visit
from tidekv_llm.documents import Document, Page
from tidekv_llm.errors import ConfigError

PAGES_PER_VIEW = 50


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
    visit.viewer = {"html": page_view(chosen, page, quote, entry)}


def open_text(visit: Visit, key: str, tokens: dict[int, int], start: int = 0) -> None:
    """Show what was read from a file, page by page."""
    entry = visit.entry(key)
    if entry.document is None:
        raise ConfigError(f"{entry.name} is not read yet")
    visit.viewer = {"html": text_view(entry, tokens, start)}


def page_view(document: Document, number: int, quote: str | None, entry: Entry | None) -> str:
    """A page as a picture, if it can be drawn, and as text."""
    page = next((page for page in document.pages if page.number == number), None)
    if page is None:
        raise ConfigError(f"{document.name} has no page {number}")
    image = (
        draw_page(entry.path, number, quote=quote, password=entry.password) if entry and _there(entry.path) else None
    )
    found = find_quote(page.text, quote) if quote else None
    missing = quote is not None and found is None
    label = f" (printed {page.label})" if page.label != str(page.number) else ""
    note = '<p class="tk-warn">Unverified: this quotation does not stand on the page.</p>' if missing else ""
    body = _text(page, found)
    if image is not None:
        body = f"{_picture(image, number)}<details><summary>Text given to the model</summary>{body}</details>"
    return _frame(f"{document.name}, page {number}{label}", note + body)


def _there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _picture(image: PageImage, number: int) -> str:
    boxes = "".join(
        f'<mark style="left:{100 * x:.2f}%;top:{100 * y:.2f}%;width:{100 * w:.2f}%;height:{100 * h:.2f}%"></mark>'
        for x, y, w, h in image.boxes
    )
    return f'<div class="tk-page"><img alt="Page {number}" src="data:image/jpeg;base64,{esc(image.jpeg)}">{boxes}</div>'


def _text(page: Page, found: tuple[int, int] | None) -> str:
    if not page.text.strip():
        return f'<p class="tk-warn">{esc(page.problem or "This page has no text.")}</p>'
    if found is None:
        return f'<pre class="tk-page-text">{esc(page.text)}</pre>'
    start, stop = found
    before, quoted, after = page.text[:start], page.text[start:stop], page.text[stop:]
    return f'<pre class="tk-page-text">{esc(before)}<mark>{esc(quoted)}</mark>{esc(after)}</pre>'


def text_view(entry: Entry, tokens: dict[int, int], start: int) -> str:
    """Fifty pages of text at a time, with the counts of each."""
    assert entry.document is not None
    pages = entry.document.pages
    rows = extracted_table(entry, tokens)
    stop = min(start + PAGES_PER_VIEW, len(pages))
    shown = "".join(_text_row(rows[at], pages[at], opened=at == start) for at in range(start, stop))
    back = (
        button("Earlier pages", "text-at", f"{entry.key}:{max(0, start - PAGES_PER_VIEW)}", css="small")
        if start
        else ""
    )
    rest = start + PAGES_PER_VIEW < len(pages)
    on = button("Later pages", "text-at", f"{entry.key}:{start + PAGES_PER_VIEW}", css="small") if rest else ""
    left = excluded(entry)
    note = f'<p class="tk-warn">{esc(left)}</p>' if left else '<p class="tk-ok">Every page is sent.</p>'
    return _frame(f"{entry.name}: extracted text", f"{note}{shown}<div class='tk-inline'>{back}{on}</div>")


def _text_row(summary: str, page: Page, *, opened: bool) -> str:
    state = " open" if opened else ""
    return f'<details{state}><summary class="tk-num">{esc(summary)}</summary>{_text(page, None)}</details>'


def _frame(title: str, body: str) -> str:
    close = button("✕", "close-viewer", title="Close (Esc)", css="icon")
    return (
        f'<aside class="tk-drawer" role="dialog" aria-label="{esc(title)}" tabindex="-1">'
        f"<header><strong>{esc(title)}</strong>{close}</header>{body}</aside>"
    )
