"""Sessions: every answer is what a fresh prefill of the same prompt gives, and only the question is computed."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents.test_layout import Counting
from tests.sessions_for_tests import CONFIG, assert_same, document, engine, follow_up, fresh, text
from tests.tiny_models import FAMILIES
from tidekv_llm import Document, Progress, TideKV, selector_names
from tidekv_llm.errors import Cancelled, ClosedError, ConfigError, ContextOverflowError, NoTextError

QUESTIONS = ["When is high water?", "And the second one of the day, please?", "Why?"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path / "cache"))


@functools.cache
def shared() -> TideKV:
    return engine()


# --- exactness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama4_text"])
@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_follow_up_equals_a_fresh_prefill_to_the_bit_in_every_family(family: str, store: str) -> None:
    with engine(family).open(document(), store=store) as session:
        session.ingest()
        for question in QUESTIONS:
            later = follow_up(session, question)
            assert later.metrics.reused_prefix_tokens == session.document_tokens
            assert_same(later, fresh(session, question))


@pytest.mark.parametrize("selector", selector_names())
@pytest.mark.parametrize("budgets", [("uniform", "uniform"), ("pyramid", "ada"), ("cake", "uniform")], ids="-".join)
def test_every_selector_and_budget_is_exact(selector: str, budgets: tuple[str, str]) -> None:
    config = CONFIG.replace(selector=selector, layer_budget=budgets[0], head_budget=budgets[1])
    with engine("gemma3_text", config).open(document()) as session:
        session.ingest()
        for question in QUESTIONS[:2]:
            assert_same(follow_up(session, question), fresh(session, question))


@pytest.mark.parametrize("selector", ["h2o", "expected-attention"])
def test_a_selector_that_needs_the_documents_queries_says_that_nothing_was_reused(selector: str) -> None:
    with shared().with_prefill(selector=selector).open(document()) as session:
        session.ask(QUESTIONS[0], max_new_tokens=2)
        metrics = session.ask(QUESTIONS[1], max_new_tokens=2).metrics
        assert metrics.reused_prefix_tokens == 0
        assert any(selector in note and "nothing was reused" in note for note in metrics.notes)
        assert session.store_bytes == 0


def test_the_order_of_the_questions_does_not_matter() -> None:
    texts = []
    for order in ([0, 1, 2], [2, 0, 1]):
        with shared().open(document()) as session:
            answers = {at: session.ask(QUESTIONS[at], remember=False, max_new_tokens=12).text for at in order}
            texts.append([answers[at] for at in range(3)])
    assert texts[0] == texts[1]


def test_answers_equal_those_of_the_engine_without_a_session() -> None:
    with shared().open(document()) as session:
        history: list[tuple[str, str]] = []
        for question in QUESTIONS:
            expected = shared().ask(document(), question, history=history, max_new_tokens=12)
            answer = session.ask(question, max_new_tokens=12)
            assert (answer.text, answer.prompt_tokens) == (expected.text, expected.prompt_tokens)
            assert answer.citations == expected.citations
            history.append((question, answer.text))
        assert session.history == history
        session.forget()
        first = shared().ask(document(), QUESTIONS[0], max_new_tokens=12)
        assert session.ask(QUESTIONS[0], max_new_tokens=12).text == first.text


@pytest.mark.parametrize("window_size", [1, 30, 60, 1000])
def test_a_question_shorter_than_the_observation_window(window_size: int) -> None:
    config = CONFIG.replace(window_size=window_size, kept_tokens=max(70, window_size + 2))
    with engine("gemma2", config).open(document()) as session:
        session.ingest()
        later = follow_up(session, "Why?")
        expected = min(session.document_tokens, max(0, later.metrics.prompt_tokens - window_size))
        assert later.metrics.reused_prefix_tokens == expected
        # Cut elsewhere than in a fresh prefill, so the last bit may differ.
        assert_same(later, fresh(session, "Why?"), exact=False)


def test_one_store_serves_other_windows_and_budgets() -> None:
    changes: list[dict[str, Any]] = [{}, {"window_size": 4}, {"kept_tokens": 60}, {"selector": "recent"}]
    for index, change in enumerate(changes):
        with shared().with_prefill(**change).open(document(), store="disk", name="one") as session:
            later = follow_up(session, QUESTIONS[1])
            assert (later.metrics.reused_prefix_tokens > 0) == (index > 0)
            assert_same(later, fresh(session, QUESTIONS[1]))


@pytest.mark.parametrize("chunk_size", [1, 7, 5000, "auto"])
def test_any_chunk_size_is_exact(chunk_size: int | str) -> None:
    with shared().with_prefill(chunk_size=chunk_size).open(document(150)) as session:
        session.ingest()
        assert_same(follow_up(session, QUESTIONS[0]), fresh(session, QUESTIONS[0]))


def test_an_appended_document_reuses_what_was_read() -> None:
    second = document(200, seed=5, name="fees.txt")
    for store in ("memory", "disk"):
        with engine("gemma3_text").open(document(), store=store) as session:
            session.ask(QUESTIONS[0], max_new_tokens=2)
            before = session.document_tokens
            session.append(second)
            grown = follow_up(session, QUESTIONS[1])
            assert grown.metrics.reused_prefix_tokens == before < session.document_tokens
            assert_same(grown, fresh(session, QUESTIONS[1]))
            later = follow_up(session, QUESTIONS[2])
            assert later.metrics.reused_prefix_tokens == session.document_tokens
            assert_same(later, fresh(session, QUESTIONS[2]))


def test_other_instructions_are_another_document_part() -> None:
    with (
        shared().open(document(), store="disk") as first,
        shared().open(document(), store="disk", instructions="Say no.") as second,
    ):
        first.ingest()
        other = follow_up(second, QUESTIONS[0])
        assert other.metrics.reused_prefix_tokens == 0
        assert_same(other, fresh(second, QUESTIONS[0]))
        assert follow_up(first, QUESTIONS[0]).metrics.reused_prefix_tokens == first.document_tokens


def test_a_model_whose_keys_depend_on_the_length_is_read_again_and_says_so() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with engine(rope_parameters=rope, max_position_embeddings=128).with_prefill() as llm:
        llm.context_window = 4096
        with llm.open(document()) as session:
            session.ask("Why?", max_new_tokens=2)
            later = follow_up(session, QUESTIONS[1])
            assert later.metrics.reused_prefix_tokens == 0
            assert any("length of the whole prompt" in note for note in later.metrics.notes)
            assert_same(later, fresh(session, QUESTIONS[1]))


# --- the prefix cache of raw prompts --------------------------------------------------------------------


def test_consecutive_raw_prompts_reuse_what_they_share() -> None:
    plain = engine("gemma3_text")
    cached = plain.with_prefix_cache(10**8)
    start, reused = text(300), []
    for ending in (" one", " another question", " one more", ""):
        expected, got = (llm.generate(start + ending, max_new_tokens=10) for llm in (plain, cached))
        assert got.token_ids == expected.token_ids
        reused.append(got.metrics.reused_prefix_tokens)
    assert reused[0] == 0
    assert all(count >= len(start) - CONFIG.window_size for count in reused[1:])


def test_short_common_prefixes_are_not_worth_it_and_limits_hold() -> None:
    cached = shared().with_prefix_cache(10**8)
    cached.generate(text(200, 1), max_new_tokens=2)
    assert cached.generate(text(30, 1) + text(200, 2), max_new_tokens=2).metrics.reused_prefix_tokens == 0
    tiny = shared().with_prefix_cache(1000)
    notes = tiny.generate(text(200), max_new_tokens=2).metrics.notes
    assert any("limit_bytes" in note for note in notes)
    assert tiny.generate(text(200), max_new_tokens=2).metrics.reused_prefix_tokens == 0
    with pytest.raises(ConfigError, match="limit_bytes=0"):
        shared().with_prefix_cache(0)


# --- memory ---------------------------------------------------------------------------------------------


def test_the_least_recently_used_document_is_evicted_and_read_again() -> None:
    with engine() as llm, llm.open(document(seed=1)) as one, llm.open(document(seed=2)) as two:
        one.ingest()
        size = one.store_bytes
        assert size == llm._open().pool.nbytes == 3 * 2 * 2 * 8 * 4 * one.document_tokens
        llm._open().pool.limit_bytes = size + size // 2
        two.ingest()
        assert (one.store_bytes, llm._open().pool.nbytes) == (0, two.store_bytes)
        again = follow_up(one, QUESTIONS[0])
        assert again.metrics.reused_prefix_tokens == 0
        assert any("evicted" in note for note in again.metrics.notes)
        assert_same(again, fresh(one, QUESTIONS[0]))
        assert follow_up(one, QUESTIONS[0]).metrics.notes == []
        assert two.store_bytes == 0


def test_a_document_above_the_limit_is_answered_and_not_stored() -> None:
    with engine() as llm, llm.open(document(), limit_bytes=1000) as session:
        for _ in range(2):
            metrics = session.ask("Why?", max_new_tokens=2, remember=False).metrics
            assert metrics.reused_prefix_tokens == 0
            assert any("limit_bytes allows" in note for note in metrics.notes)
        assert llm._open().pool.nbytes == session.store_bytes == 0


def test_closing_frees_the_store_and_the_weights() -> None:
    llm = engine()
    model = weakref.ref(llm.model)
    session = llm.open(document())
    session.ask("Why?", max_new_tokens=2)
    keys = weakref.ref(session._prefix._store.load(0)[0])  # type: ignore[union-attr]
    pool = llm._open().pool
    llm.close()
    assert session.ask("Why?", max_new_tokens=2).text is not None
    session.close()
    session.close()
    assert pool.nbytes == 0
    gc.collect()
    assert keys() is None
    assert model() is None
    for call in (lambda: session.ask("Why?"), session.ingest, lambda: session.append(document())):
        with pytest.raises(ClosedError):
            call()


def test_sessions_in_memory_share_nothing() -> None:
    with shared().open(document()) as one, shared().open(document()) as two:
        one.ingest()
        assert follow_up(two, "Why?").metrics.reused_prefix_tokens == 0


def test_the_store_is_accounted_as_host_memory() -> None:
    with shared().open(document()) as session:
        first, later = (session.ask("Why?", max_new_tokens=2, remember=False).metrics for _ in range(2))
        assert first.components["document_store"] == later.components["document_store"] == session.store_bytes > 0
        assert later.components["active_kv"] == first.components["active_kv"]
        assert later.components["bridge"] < first.components["bridge"] / 2
    with shared().open(document(), store="disk") as on_disk:
        assert on_disk.ask("Why?", max_new_tokens=2).metrics.components["document_store"] == 0
        assert on_disk.store_bytes > 0


def test_an_int8_store_is_close() -> None:
    with shared().open(document(), int8=True) as session, shared().open(document()) as plain:
        session.ingest()
        plain.ingest()
        # float32 to 8 bits and a scale for each 8 values or each channel
        assert session.store_bytes < plain.store_bytes / 2.5
        later, exact = follow_up(session, QUESTIONS[1]), fresh(session, QUESTIONS[1])
        assert torch.nn.functional.cosine_similarity(later.logits, exact.logits, dim=0) > 0.99


# --- cancelling and threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("at", [1, 9])
def test_a_cancelled_question_leaves_the_session_usable_and_no_half_store(store: str, at: int, tmp_path: Path) -> None:
    with engine().open(document(), store=store) as session:
        for prepare in (None, session.ingest, lambda: session.append(document(200, seed=3, name="b"))):
            if prepare is not None:
                prepare()
            cancel, seen = threading.Event(), []

            def stop(step: Progress, seen: list[Progress] = seen, cancel: threading.Event = cancel) -> None:
                seen.append(step)
                if len(seen) == min(at, 3):
                    cancel.set()

            with pytest.raises(Cancelled):
                session.ask(QUESTIONS[0], progress=stop, cancel=cancel)
            assert not list(tmp_path.rglob("*.partial"))
            assert session.history == []
        later = follow_up(session, QUESTIONS[0])
        assert 0 < later.metrics.reused_prefix_tokens < session.document_tokens
        assert_same(later, fresh(session, QUESTIONS[0]))


def test_questions_from_threads_read_the_document_once() -> None:
    with engine() as llm:
        sessions = [llm.open(document(seed=seed)) for seed in range(2)]
        expected = [
            [llm.ask(document(seed=seed), question, max_new_tokens=6).text for question in QUESTIONS]
            for seed in range(2)
        ]
        got: dict[tuple[int, int], Any] = {}

        def ask(seed: int, at: int) -> None:
            got[seed, at] = sessions[seed].ask(QUESTIONS[at], remember=False, max_new_tokens=6)

        threads = [threading.Thread(target=ask, args=(seed, at)) for seed in range(2) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed in range(2):
            assert [got[seed, at].text for at in range(3)] == expected[seed]
            reused = sorted(got[seed, at].metrics.reused_prefix_tokens for at in range(3))
            assert reused == [0, sessions[seed].document_tokens, sessions[seed].document_tokens]
            sessions[seed].close()


def test_closing_while_a_question_is_read_leaves_nothing_behind() -> None:
    with engine() as llm:
        session = llm.open(document())
        with pytest.raises(ClosedError):
            session.ask("Why?", max_new_tokens=2, progress=lambda step: session.close())
        assert llm._open().pool.nbytes == 0


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"store": "tape"},
        {"int8": True, "store": "disk"},
        {"name": "x"},
        {"store": "disk", "name": "../x"},
        {"limit_bytes": 0},
    ],
    ids=str,
)
def test_impossible_options_are_refused_and_keep_no_weights(options: dict[str, Any]) -> None:
    with engine() as llm:
        with pytest.raises(ConfigError):
            llm.open(document(), **options)
        assert llm._open().users == 1


def test_documents_that_do_not_fit_or_cannot_be_read() -> None:
    llm = shared().with_prefill()
    llm.context_window = 400
    with pytest.raises(ContextOverflowError):
        llm.open(document(500))
    with pytest.raises(NoTextError):
        llm.open(Document.from_pages(["", ""], "empty.pdf", ["1", "2"]))
    with llm.open(document(200)) as session:
        session.ask("Why?", max_new_tokens=2)
        with pytest.raises(ContextOverflowError):
            session.append(document(300, name="b"))
        assert len(session.documents) == 1
        with pytest.raises(ContextOverflowError):
            session.ask("Why? " * 60)
        assert session.ask("Why?", max_new_tokens=2, remember=False).metrics.reused_prefix_tokens > 0


def test_a_question_does_not_tokenise_the_documents_again() -> None:
    llm, told = engine(), document(300)
    tokenizer = Counting(llm.tokenizer)
    llm._open().tokenizer = tokenizer  # type: ignore[assignment]
    words = told.pages[0].text[:40]
    with llm.open(told) as session:
        assert sum(words in text for text in tokenizer.seen) == 1
        tokenizer.seen.clear()
        for question in ("Why?", "And when?"):
            session.ask(question, max_new_tokens=3)
        assert tokenizer.seen
        assert not any(words in text for text in tokenizer.seen)
