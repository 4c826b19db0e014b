"""What a framework's loader gave, as documents: items of one page together, each page with its place in the list."""

from __future__ import annotations

import numbers
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import PurePath
from typing import Any

from tidekv_llm.documents.pages import Document, Page
from tidekv_llm.documents.prompt import document_names
from tidekv_llm.errors import ConfigError

_SOURCE_KEYS = ("source", "file_path", "file_name", "filename")


@dataclass(frozen=True)
class Corpus:
    """What a loader gave, as pages.

    Args:
        documents: one per source, in the order of first appearance.
        sources: each document's source as the metadata has it, None without one.
        items: (document, page number) to the indices of the loader's items that make up this page.
    """

    documents: tuple[Document, ...]
    sources: tuple[str | None, ...]
    items: dict[tuple[int, int], tuple[int, ...]]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What the documents are called: as in the prompt, where equal names are told apart."""
        return document_names(self.documents)

    def where(self, document: int, page: int, label: str) -> dict[str, Any]:
        """A page as JSON values."""
        return {
            "source": self.sources[document],
            "document": self.names[document],
            "page_label": label,
            "items": list(self.items[document, page]),
        }


@dataclass(frozen=True)
class LoadedItem:
    """One item of a loader's list, or a piece that a splitter cut from one.

    Args:
        text: its text.
        metadata: ``source``, ``file_path`` or ``file_name`` separate documents; ``page`` counted from 0, or
            ``page_number`` from 1, is the page's place in it; ``page_label`` is what is shown.
        owner: tells the loader's own items apart, where the framework does; pieces of one item share it.
    """

    text: str
    metadata: Mapping[str, Any]
    owner: Hashable = None

    @property
    def source(self) -> str | None:
        """What tells its document from others."""
        return next((str(self.metadata[key]) for key in _SOURCE_KEYS if self.metadata.get(key)), None)

    @property
    def page(self) -> int | None:
        """Its page counted from 0, where the metadata has a number; 3.0 and NumPy's numbers are numbers too."""
        page = _whole(self.metadata.get("page"))
        number = _whole(self.metadata.get("page_number"))
        return page if page is not None or number is None else number - 1

    @property
    def label(self) -> str | None:
        """What its page is called."""
        label = _shown(self.metadata.get("page_label"))
        if label is None and self.page is not None:
            return str(self.page + 1)
        return label or _shown(self.metadata.get("page"))


def corpus_of(items: Iterable[LoadedItem]) -> Corpus:
    """Documents and pages of a loader's list.

    A page is known by its document and its place in it. Where only labels tell, neighbours with one label are one
    page; what has neither is a page of its own. Labels that are missing or repeated are replaced by numbers, since an
    answer could not cite them.

    Raises:
        ConfigError: no item, or a text that is not a string.
    """
    groups: dict[str | None, list[tuple[int, LoadedItem]]] = {}
    for index, item in enumerate(items):
        if not isinstance(item.text, str):
            raise ConfigError(f"documents[{index}] holds {type(item.text).__name__} instead of text")
        groups.setdefault(item.source, []).append((index, item))
    if not groups:
        raise ConfigError("the document list is empty; pass at least one document")
    pages = [_pages(group) for group in groups.values()]
    return Corpus(
        tuple(_document(source, found) for source, found in zip(groups, pages, strict=True)),
        tuple(groups),
        {(at, number): page.indices for at, found in enumerate(pages) for number, page in enumerate(found, 1)},
    )


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    number = float(value)
    return int(number) if number.is_integer() and number >= 0 else None


def _shown(value: object) -> str | None:
    """A label that can stand inside ``[p. ...]``; None for one that is missing, NaN included."""
    if value is None or value != value:
        return None
    whole = _whole(value)
    text = " ".join(re.sub(r"[\[\]]", " ", str(value if whole is None else whole)).split())
    return text or None


@dataclass
class _LoadedPage:
    page: int | None
    label: str | None
    indices: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


def _pages(group: Sequence[tuple[int, LoadedItem]]) -> list[_LoadedPage]:
    """The pages of one document in the order of their first item."""
    pages: dict[Hashable, _LoadedPage] = {}
    key: Hashable = None
    before: LoadedItem | None = None
    for index, item in group:
        key = _page_key(item) or (key if _goes_on(before, item) else index)
        page = pages.setdefault(key, _LoadedPage(item.page, item.label))
        page.indices += (index,)
        page.texts += (item.text,)
        before = item
    return list(pages.values())


def _page_key(item: LoadedItem) -> Hashable:
    """What the pieces of one page share; None where only the neighbours can tell."""
    if item.page is not None:
        return "page", item.page
    return None if item.owner is None or item.label is None else ("owner", item.owner, item.label)


def _goes_on(before: LoadedItem | None, item: LoadedItem) -> bool:
    return before is not None and before.page is None and item.label is not None and before.label == item.label


def _document(source: str | None, pages: Sequence[_LoadedPage]) -> Document:
    name = "document" if source is None else PurePath(source.replace("\\", "/")).name or source
    labels, warnings = _labels(pages)
    texts = ["\n".join(page.texts) for page in pages]
    if not any(text.strip() for text in texts):
        empty = tuple(Page(number, label, "", "no text") for number, label in enumerate(labels, 1))
        return Document(name, empty, (f"{name} has no text; left out",))
    made = Document.from_pages(texts, name, labels)
    return replace(made, warnings=(*made.warnings, *warnings))


def _labels(pages: Sequence[_LoadedPage]) -> tuple[list[str], tuple[str, ...]]:
    """One label per page, none twice, and what to warn of; as for a PDF, numbers stand in for repeated ones."""
    named = [page.label for page in pages if page.label is not None]
    if len(set(named)) == len(named):
        free = (str(number) for number in count(1) if str(number) not in named)
        return [next(free) if page.label is None else page.label for page in pages], ()
    places = [page.page for page in pages if page.page is not None]
    shown = places if len(places) == len(pages) else range(len(pages))
    return [str(place + 1) for place in shown], ("page labels are repeated; pages are numbered instead",)
