"""What a framework's loader gave, as documents: items of one page together, each page with its place in the list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from tidekv_llm.documents.pages import Document, Page
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

    def where(self, document: int, page: int, label: str) -> dict[str, Any]:
        """A page as JSON values."""
        return {
            "source": self.sources[document],
            "document": self.documents[document].name,
            "page_label": label,
            "items": list(self.items[document, page]),
        }


def corpus_of(items: Iterable[tuple[str, Mapping[str, Any]]]) -> Corpus:
    """Pages from (text, metadata) pairs.

    ``source`` (or ``file_name``) separates documents; ``page_label``, or ``page`` counted from 0, names pages.
    Items of the same page are one page. What has no name is numbered.

    Raises:
        ConfigError: no item, or a text that is not a string.
    """
    groups: dict[str | None, list[tuple[int, str, str | None]]] = {}
    for index, (text, metadata) in enumerate(items):
        if not isinstance(text, str):
            raise ConfigError(f"documents[{index}] holds {type(text).__name__} instead of text")
        groups.setdefault(_source(metadata), []).append((index, text, _label(metadata)))
    if not groups:
        raise ConfigError("the document list is empty; pass at least one document")
    documents: list[Document] = []
    members: dict[tuple[int, int], tuple[int, ...]] = {}
    for at, (source, parts) in enumerate(groups.items()):
        pages = _merge_parts(parts)
        documents.append(_document(source, pages))
        members |= {(at, number): indices for number, (indices, _, _) in enumerate(pages, 1)}
    return Corpus(tuple(documents), tuple(groups), members)


def _source(metadata: Mapping[str, Any]) -> str | None:
    return next((str(metadata[key]) for key in _SOURCE_KEYS if metadata.get(key)), None)


def _label(metadata: Mapping[str, Any]) -> str | None:
    label, page = metadata.get("page_label"), metadata.get("page")
    if label is None or not str(label).strip():
        label = page + 1 if isinstance(page, int) and not isinstance(page, bool) else page
    text = " ".join(re.sub(r"[\[\]]", " ", str(label if label is not None else "")).split())
    return text or None


_Merged = tuple[tuple[int, ...], str, str]


def _merge_parts(parts: Sequence[tuple[int, str, str | None]]) -> list[_Merged]:
    """(item indices, label, text) of each page, in reading order."""
    named = {label for _, _, label in parts if label is not None}
    numbers = (str(number) for number in range(1, len(parts) + len(named) + 1) if str(number) not in named)
    pages: dict[str, tuple[list[int], list[str]]] = {}
    for index, text, label in parts:
        indices, texts = pages.setdefault(label if label is not None else next(numbers), ([], []))
        indices.append(index)
        texts.append(text)
    return [(tuple(indices), label, "\n".join(texts)) for label, (indices, texts) in pages.items()]


def _document(source: str | None, pages: Sequence[_Merged]) -> Document:
    name = "document" if source is None else PurePath(source.replace("\\", "/")).name or source
    if not any(text.strip() for _, _, text in pages):
        empty = tuple(Page(number, label, "", "no text") for number, (_, label, _) in enumerate(pages, 1))
        return Document(name, empty, (f"{name} has no text; left out",))
    return Document.from_pages([text for _, _, text in pages], name, [label for _, label, _ in pages])
