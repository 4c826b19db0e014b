"""A loader's list as documents: which items are one page, which document they belong to, what they are called."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidekv_llm.documents.loaded import Corpus, LoadedItem, corpus_of
from tidekv_llm.errors import ConfigError


def corpus(*items: tuple[str, dict[str, Any]]) -> Corpus:
    return corpus_of(LoadedItem(text, metadata) for text, metadata in items)


def labels(*metadata: dict[str, Any]) -> list[list[str]]:
    found = corpus(*((f"text {index}", one) for index, one in enumerate(metadata)))
    return [[page.label for page in document.pages] for document in found.documents]


def test_labels_come_from_page_label_then_page_then_position() -> None:
    meta: list[dict[str, Any]] = [
        {"source": "a.pdf", "page": 0, "page_label": "iv"},
        {"source": "a.pdf", "page": 1},
        {"source": "a.pdf"},
        {"file_name": "b.pdf", "page_label": "A-3"},
        {},
        {},
    ]
    assert labels(*meta) == [["iv", "2", "1"], ["A-3"], ["1", "2"]]
    assert corpus(*(("text", one) for one in meta)).sources == ("a.pdf", "b.pdf", None)


def test_pieces_of_one_page_are_one_page() -> None:
    found = corpus(("first", {"source": "a", "page": 3}), ("else", {"page": 3}), ("second", {"source": "a", "page": 3}))
    assert [page.text for page in found.documents[0].pages] == ["first\nsecond"]
    assert found.items == {(0, 1): (0, 2), (1, 1): (1,)}


def test_pages_whose_labels_begin_again_stay_apart() -> None:
    """The body's page 1 and the annex's are two pages, whatever is printed on them."""
    meta = [{"source": "a.pdf", "page": page, "page_label": str(page % 3 + 1)} for page in range(6)]
    (document,) = corpus(*((f"text {index}", one) for index, one in enumerate(meta))).documents
    assert [page.text for page in document.pages] == [f"text {index}" for index in range(6)]
    assert [page.label for page in document.pages] == ["1", "2", "3", "4", "5", "6"]
    assert "page labels are repeated" in document.warnings[0]


def test_labels_that_begin_again_without_page_numbers_stay_apart_too() -> None:
    """Neighbours with one label are pieces of a page; a label that comes back later is another page."""
    (document,) = corpus(*((text, {"page_label": text[0]}) for text in ("1 a", "1 b", "2 c", "1 d", "2 e"))).documents
    assert [page.text for page in document.pages] == ["1 a\n1 b", "2 c", "1 d", "2 e"]
    assert [page.label for page in document.pages] == ["1", "2", "3", "4"]


def test_two_pages_with_one_label_of_two_loaded_items_are_two_pages() -> None:
    items = [LoadedItem(text, {"page_label": "A"}, owner) for text, owner in (("a", 1), ("b", 2), ("a2", 1))]
    (document,) = corpus_of(items).documents
    assert [page.text for page in document.pages] == ["a\na2", "b"]


@pytest.mark.parametrize("page", [3, 3.0, np.int64(3), np.float32(3), np.uint8(3)], ids=repr)
def test_every_kind_of_number_is_a_page_number(page: Any) -> None:
    assert labels({"page": page}) == [["4"]]
    found = corpus(("a", {"page": page, "page_label": "x"}), ("b", {"page": 3}))
    assert [one.text for one in found.documents[0].pages] == ["a\nb"]


@pytest.mark.parametrize(
    ("metadata", "label"),
    [
        ({"page_label": np.float64(7)}, "7"),
        ({"page_label": 7.0, "page": 1}, "7"),
        ({"page_label": float("nan"), "page": 1}, "2"),
        ({"page": float("nan")}, "1"),
        ({"page": True}, "True"),
        ({"page": -1}, "-1"),
        ({"page": "iv"}, "iv"),
        ({"page": 2.5}, "2.5"),
        ({"page_number": 3}, "3"),
        ({"page_number": 3.0, "page": 0}, "1"),
        ({"page_label": "  "}, "1"),
        ({"page_label": "[1]\n"}, "1"),
    ],
    ids=str,
)
def test_what_a_page_is_called(metadata: dict[str, Any], label: str) -> None:
    assert labels(metadata) == [[label]]


def test_files_of_one_name_in_several_folders_are_several_documents_with_names_of_their_own() -> None:
    meta = [{"source": f"/{folder}/invoice.pdf", "page": page} for folder in "abc" for page in range(2)]
    found = corpus(*((f"text {index}", one) for index, one in enumerate(meta)))
    assert [len(document.pages) for document in found.documents] == [2, 2, 2]
    names = [found.where(document, 1, "1")["document"] for document in range(3)]
    assert names == ["invoice.pdf", "invoice.pdf (2)", "invoice.pdf (3)"]


def test_a_windows_path_names_its_file() -> None:
    found = corpus(("a", {"file_path": r"C:\x\invoice.pdf"}), ("b", {"file_path": r"C:\y\Invoice.pdf"}))
    assert found.names == ("invoice.pdf", "Invoice.pdf (2)")


def test_a_source_without_text_is_kept_and_said() -> None:
    found = corpus(("x", {"page_label": "1"}), ("  ", {"source": "scan.pdf", "page": 0}))
    assert found.documents[1].warnings == ("scan.pdf has no text; left out",)


@pytest.mark.parametrize(("items", "says"), [([], "empty"), ([(5, {})], "int instead of text")])
def test_bad_items(items: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        corpus(*items)
