"""Which pages match a question best, and which of them fit."""

from __future__ import annotations

import sys

import pytest

from tidekv_llm.documents import Document
from tidekv_llm.documents.ranking import bm25_order, fill_room, only_pages, ranked_pages
from tidekv_llm.errors import ConfigError


def test_bm25_puts_the_page_with_the_words_first() -> None:
    pages = ["The harbour has two moles.", "The lens weighs 3.1 tonnes.", "Keepers cook for all."]
    assert bm25_order("What does the lens weigh, in tonnes?", pages)[0] == 1
    assert bm25_order("灯台の高さは？", ["港は二つある。", "灯台の高さは四十一メートル。"])[0] == 1
    assert bm25_order("?!", pages) == [0, 1, 2]
    assert bm25_order("zebra", pages) == [0, 1, 2]  # a word that is nowhere


def test_the_page_with_the_rare_words_comes_first_and_the_room_is_kept() -> None:
    book = Document.from_pages(["the cat and the dog", "the zebra eats grass", "the dog and the bird"], "b.pdf")
    assert ranked_pages([book], "What does the zebra eat?")[0] == (0, 2)
    tokens = {(0, page): 10 for page in (1, 2, 3)}
    kept = fill_room(ranked_pages([book], "zebra dog"), tokens, room=25)
    assert len(kept) == 2 and (0, 2) in kept
    assert fill_room(ranked_pages([book], "zebra"), tokens, room=5) == set()
    assert fill_room([(0, 1), (0, 2), (9, 9)], {(0, 1): 30, (0, 2): 10}, room=20) == {(0, 2)}


def test_pages_of_several_documents_compete() -> None:
    books = [Document.from_pages(["red", "blue"], "1"), Document.from_pages(["green", "blue blue"], "2")]
    kept = fill_room(ranked_pages(books, "green"), {(d, p): 10 for d in (0, 1) for p in (1, 2)}, room=10)
    chosen = only_pages(books, kept)
    assert [(book.name, [page.number for page in book.pages]) for book in chosen] == [("1", []), ("2", [1])]


def test_the_app_and_the_frameworks_find_one_page_in_a_script_without_spaces() -> None:
    pages = ["本合同由甲乙双方签订。", "租金每月支付。", "通知期是三个月。"]
    assert ranked_pages([Document.from_pages(pages, "c.pdf")], "通知期是多久？")[0] == (0, 3)


def test_without_bm25s_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match="pip install bm25s"):
        bm25_order("tower", ["the tower", "the sea"])
