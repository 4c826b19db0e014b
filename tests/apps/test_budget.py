"""The budget is the prompt's true length, and what was counted once is not counted again."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.apps.support import MODEL
from tests.integrations.tiny import save_tiny_chat
from tidekv_apps.budget import BudgetCounter, Source
from tidekv_apps.settings import AskSettings
from tidekv_llm.documents import Document, build_prompt
from tidekv_llm.service import ModelFacts

SETTINGS = AskSettings(model=MODEL, max_new_tokens=30)
HARBOUR = Document.from_pages(
    ["The harbour master is Ida Holm.", "A berth costs 42 crowns.", "Dogs stay out."], "h.pdf"
)
GARDEN = Document.from_pages(["The pond is 3 metres deep.", "The gardener is Otto Brandt."], "garden.pdf")
TURNS = [("Who is the master?", "Ida Holm."), ("And the gardener, please?", "Otto Brandt, it says.")]


class Noting:
    """A tokenizer that notes what it is given."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.texts: list[str] = []

    def __call__(self, text: str, **options: Any) -> Any:
        self.texts.append(text)
        return self.inner(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def of_documents(self) -> list[str]:
        """The pages among what it was given."""
        return [text for text in self.texts if any(page.text in text for d in (HARBOUR, GARDEN) for page in d.pages)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_tiny_chat(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without a chat template: the prompt of a base model."""
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_chat(tmp_path_factory.mktemp("plain")))
    tokenizer.chat_template = None
    return tokenizer


def facts(tokenizer: Any) -> ModelFacts:
    return ModelFacts(MODEL, tokenizer, None, 10_000, ())  # type: ignore[arg-type]


@pytest.mark.parametrize("template", ["chat", "plain"])
@pytest.mark.parametrize("history", [[], TURNS[:1], TURNS], ids=len)
@pytest.mark.parametrize("pages", ["", "2", "1,3"])
@pytest.mark.parametrize("others", [[], [GARDEN]], ids=["alone", "two files"])
def test_the_budget_is_the_length_of_the_prompt(
    request: pytest.FixtureRequest, template: str, history: list[tuple[str, str]], pages: str, others: list[Document]
) -> None:
    tokenizer = request.getfixturevalue(template)
    chosen = HARBOUR.select(pages) if pages else HARBOUR
    sources = [Source(HARBOUR, chosen), *(Source(one, one) for one in others)]
    budget = BudgetCounter().count(sources, history, SETTINGS, facts(tokenizer), " What does a berth cost? ")
    prompt = build_prompt([chosen, *others], " What does a berth cost? ", tokenizer, history=history)
    assert budget is not None
    assert budget.total == len(prompt) + SETTINGS.max_new_tokens
    assert budget.page_tokens == {(span.document, span.page): span.stop - span.start for span in prompt.spans}


def test_order_choice_of_pages_question_and_history_count_no_document_again(chat: Any) -> None:
    noting, counter = Noting(chat), BudgetCounter()
    both = [Source(HARBOUR, HARBOUR), Source(GARDEN, GARDEN)]
    assert not counter.is_counted(both, facts(noting))
    counter.count(both, [], SETTINGS, facts(noting), "")
    noting.texts.clear()
    assert counter.is_counted(both, facts(noting))
    for sources, history, question in (
        (both[::-1], [], ""),
        ([Source(HARBOUR, HARBOUR.select("2")), both[1]], [], ""),
        (both, TURNS, "Why?"),
    ):
        assert counter.count(sources, history, SETTINGS, facts(noting), question) is not None
    assert noting.of_documents() == []


def test_another_model_counts_with_its_own_tokens(chat: Any) -> None:
    counter, sources = BudgetCounter(), [Source(HARBOUR, HARBOUR)]
    counter.count(sources, [], SETTINGS, facts(chat), "")
    other = ModelFacts("another", chat, None, 10_000, ())  # type: ignore[arg-type]
    assert not counter.is_counted(sources, other)


def test_nothing_of_a_document_stays_counted_that_is_gone(chat: Any) -> None:
    counter = BudgetCounter()
    counter.count([Source(HARBOUR, HARBOUR)], [], SETTINGS, facts(chat), "")
    counter.count([Source(GARDEN, GARDEN)], [], SETTINGS, facts(chat), "")
    assert not counter.is_counted([Source(HARBOUR, HARBOUR)], facts(chat))
    counter.forget()
    assert not counter.is_counted([Source(GARDEN, GARDEN)], facts(chat))
