"""The documents' part of a prompt: made once, the same ids as a prompt made in one go, exact counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.documents.test_prompt import BOOK, CHATML, COUNTS_TURNS, NO_SYSTEM, make_tokenizer
from tidekv_llm.documents import Document, build_prompt, document_ends, lay_out
from tidekv_llm.errors import ConfigError, ContextOverflowError, NoTextError

SAYS_LAST = "{% for m in messages %}{% if loop.last %}LAST {% endif %}" + CHATML.removeprefix("{% for m in messages %}")
DAYS = "{{ strftime_now('%H:%M:%S.%f') }}" + CHATML
TEMPLATES = {"chatml": CHATML, "no system": NO_SYSTEM, "counts": COUNTS_TURNS, "says last": SAYS_LAST, "plain": None}
HISTORIES = ([], [("Why? ", " Because.\n")], [("a", "b"), ("<|im_end|>", "")])


class Counting:
    """A tokenizer that remembers what it was given to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.seen = tokenizer, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.seen.append(text)
        return self._tokenizer(text, **options)


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return make_tokenizer(request.param, adds_bos=request.param in (None, NO_SYSTEM))


@pytest.mark.parametrize("history", HISTORIES, ids=len)
@pytest.mark.parametrize("instructions", ["Answer.", ""])
def test_one_layout_for_many_questions_gives_the_ids_of_one_prompt_for_each(
    tokenizer: Any, history: list[tuple[str, str]], instructions: str
) -> None:
    layout = lay_out(BOOK, tokenizer, instructions=instructions)
    for question in ("Why?", " What <|im_start|> now?\n"):
        prompt = layout.prompt(question, history)
        assert prompt == build_prompt(BOOK, question, tokenizer, history=history, instructions=instructions)
        assert prompt.token_ids == (*layout.token_ids, *layout.behind(question, history))
        assert prompt.token_ids[: prompt.document_end] == layout.token_ids
        assert document_ends(prompt) == layout.ends


def test_a_question_encodes_no_page_again(tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    layout = lay_out(BOOK, counting)
    assert sum("page." in text for text in counting.seen) == len(BOOK.pages)
    counting.seen.clear()
    layout.prompt("Why?", [("Who?", "She.")])
    assert counting.seen
    assert not any("page." in text for text in counting.seen)


def test_counts_are_exact_before_there_is_a_question(tokenizer: Any) -> None:
    """What an app shows while a question is typed: the frame counts from the start, each letter when it comes."""
    layout = lay_out(BOOK, tokenizer)
    assert len(layout) + len(layout.behind("")) + len("Why?") == len(layout.prompt("Why?"))


def test_a_template_with_a_clock_leaves_the_documents_where_they_were() -> None:
    """The date in a system prompt changes over night; the stored document part was read with yesterday's."""
    layout = lay_out(BOOK, make_tokenizer(DAYS))
    assert layout.prompt("Why?").token_ids[: len(layout)] == layout.token_ids


def test_what_cannot_be_laid_out_is_said_before_anything_is_encoded() -> None:
    counting = Counting(make_tokenizer())
    for documents, error in (([], ConfigError), (Document.from_pages(["/g1/g2/g3/g4"], "bad"), NoTextError)):
        with pytest.raises(error):
            lay_out(documents, counting)
    with pytest.raises(ConfigError, match="question is empty"):
        build_prompt(BOOK, " ", counting)
    assert counting.seen == []


def test_the_documents_alone_can_overflow(tokenizer: Any) -> None:
    layout = lay_out(BOOK, tokenizer)
    layout.check(len(layout) + 7, answer_reserve=7)
    with pytest.raises(ContextOverflowError):
        layout.check(len(layout) + 6, answer_reserve=7)
