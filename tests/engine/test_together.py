"""Many questions at once: the answers of one by one, and each row is its own."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from tests.sessions_for_tests import CONFIG, document, engine
from tidekv_llm import TideKV
from tidekv_llm.engine import Answer
from tidekv_llm.errors import Cancelled, ClosedError, ConfigError, ContextOverflowError, MemoryLimitError
from tidekv_llm.request import Request

QUESTIONS = [
    "When is high water?",
    "Which harbour?",
    "How high is it on the third day of the table?",
    "Who?",
    "Why so?",
]
CONFIGS: dict[str, dict[str, Any]] = {
    "rectangular": {},
    "ada": {"head_budget": "ada"},
    "4 bits": {"kv_bits": 4, "kv_residual": 8},
    "one shot": {"schedule": "one-shot"},  # nothing can be reused
}


@functools.cache
def engine_of(family: str = "llama") -> TideKV:
    return engine(family)


def texts(outcomes: list[Any]) -> list[str]:
    assert all(isinstance(outcome, Answer) for outcome in outcomes), outcomes
    return [outcome.text for outcome in outcomes]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_texts_are_those_of_one_by_one(config: str) -> None:
    llm = engine_of().with_prefill(CONFIG.replace(**CONFIGS[config]))
    one_by_one = [llm.ask(document(), question, max_new_tokens=20) for question in QUESTIONS]
    for together in (1, 2, 8):
        outcomes = llm.ask_many(document(), QUESTIONS, max_new_tokens=20, together=together)
        assert texts(outcomes) == texts(one_by_one)
        assert [each.citations for each in outcomes] == [each.citations for each in one_by_one]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "gpt_oss"])
def test_other_families_answer_together_too(family: str) -> None:
    llm = engine_of(family)
    one_by_one = [llm.ask(document(), question, max_new_tokens=12) for question in QUESTIONS]
    assert texts(llm.ask_many(document(), QUESTIONS, max_new_tokens=12)) == texts(one_by_one)


def test_sampled_answers_are_those_of_one_by_one() -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 16}
    one_by_one = [engine_of().ask(document(), question, **options) for question in QUESTIONS]
    assert texts(engine_of().ask_many(document(), QUESTIONS, **options)) == texts(one_by_one)


def test_rows_that_end_make_room_for_the_next() -> None:
    llm, alive, most = engine_of(), [0], [0]
    with llm.open(document()) as session:
        begin = session._begin

        def counted(*arguments: Any) -> Any:
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            return begin(*arguments)

        session._begin = counted  # type: ignore[method-assign]
        told: list[int] = []

        def on_answer(number: int, outcome: Any) -> None:
            alive[0] -= 1
            told.append(number)

        outcomes = session.ask_many(QUESTIONS, together=2, on_answer=on_answer, max_new_tokens=6)
        assert most[0] == 2
        assert texts(outcomes) == texts(session.ask_many(QUESTIONS, max_new_tokens=6))
    assert sorted(told) == list(range(len(QUESTIONS)))


def test_the_document_is_read_once() -> None:
    outcomes = engine_of().ask_many(document(), QUESTIONS, max_new_tokens=2)
    reused = [outcome.metrics.reused_prefix_tokens for outcome in outcomes if isinstance(outcome, Answer)]
    assert reused[0] == 0
    assert all(tokens > 100 for tokens in reused[1:])


def test_a_question_that_cannot_be_asked_leaves_the_others_alone() -> None:
    llm = engine_of()
    questions = [QUESTIONS[0], "x" * 5000, QUESTIONS[1]]
    first, second, third = llm.ask_many(document(), questions, max_new_tokens=8)
    assert isinstance(second, ContextOverflowError)
    expected = llm.ask_many(document(), [QUESTIONS[0], QUESTIONS[1]], max_new_tokens=8)
    assert texts([first, third]) == texts(expected)


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_cancelled_row_leaves_the_others_alone(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine_of()
    expected = texts(llm.ask_many(document(), QUESTIONS, max_new_tokens=10))
    events = [threading.Event() for _ in QUESTIONS]
    if when == "before":
        events[2].set()
    else:
        looked, check = [0], Request.check_cancelled

        def later(request: Request) -> None:
            looked[0] += request.cancel is events[2]
            if looked[0] == 12:
                events[2].set()
            check(request)

        monkeypatch.setattr(Request, "check_cancelled", later)
    outcomes = llm.ask_many(document(), QUESTIONS, max_new_tokens=10, cancel=events)
    assert isinstance(outcomes.pop(2), Cancelled)
    assert texts(outcomes) == expected[:2] + expected[3:]


def test_one_event_cancels_them_all() -> None:
    event = threading.Event()
    event.set()
    outcomes = engine_of().ask_many(document(), QUESTIONS, cancel=event)
    assert all(isinstance(outcome, Cancelled) for outcome in outcomes)


def test_a_step_without_memory_stops_those_that_were_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    steps, _ = llm._open().steps()

    def refuse(*arguments: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(steps, "step", refuse)
    outcomes = llm.ask_many(document(), QUESTIONS[:2], max_new_tokens=4)
    assert all(isinstance(outcome, MemoryLimitError) for outcome in outcomes)
    monkeypatch.undo()
    assert len(texts(llm.ask_many(document(), QUESTIONS[:2], max_new_tokens=4))) == 2


def test_what_cannot_work_is_refused_before_anything_is_read() -> None:
    llm = engine_of()
    with pytest.raises(ConfigError, match="must be a list of strings; ask"):
        llm.ask_many(document(), "When?")
    with pytest.raises(ConfigError, match="cancel has 1 events for 5 questions"):
        llm.ask_many(document(), QUESTIONS, cancel=[None])
    with pytest.raises(ConfigError, match="together=0"):
        llm.ask_many(document(), QUESTIONS, together=0)
    with pytest.raises(ConfigError, match="temperature=-1"):
        llm.ask_many(document(), QUESTIONS, temperature=-1)
    assert llm.ask_many(document(), []) == []
    session = llm.open(document())
    session.close()
    with pytest.raises(ClosedError):
        session.ask_many(QUESTIONS)


def test_a_sessions_history_is_neither_seen_nor_joined() -> None:
    with engine_of().open(document()) as session:
        alone = texts(session.ask_many(QUESTIONS[:2], max_new_tokens=8))
        session.history = [("Who?", "The keeper.")]
        assert texts(session.ask_many(QUESTIONS[:2], max_new_tokens=8)) == alone
        assert session.history == [("Who?", "The keeper.")]
