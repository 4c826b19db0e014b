"""The engine around the path: cancelling, progress, threads, life cycle, bad input, metrics."""

from __future__ import annotations

import functools
import gc
import json
import threading
import time
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.decode.tokenizers_for_tests import byte_tokenizer
from tests.tiny_models import VOCABULARY, random_prompt, tiny_model
from tidekv_llm import CompressedCache, PrefillConfig, Progress, TideKV
from tidekv_llm.errors import Cancelled, ClosedError, ConfigError, ContextOverflowError

CONFIG = PrefillConfig(chunk_size=16, kept_tokens=20, window_size=6, sinks=2)
S = 75


def make(**changes: Any) -> TideKV:
    return TideKV(tiny_model(**changes), prefill=CONFIG)


@functools.cache
def shared() -> TideKV:
    return make()


@functools.cache
def with_text() -> TideKV:
    return TideKV(tiny_model(vocab_size=259), byte_tokenizer(), prefill=CONFIG)


# --- progress and cancelling ----------------------------------------------------------------------------


def steps_of(engine: TideKV, length: int, **options: Any) -> list[Progress]:
    seen: list[Progress] = []
    engine.prefill(random_prompt(length), progress=seen.append, **options)
    return seen


def test_progress_counts_every_chunk_of_every_layer() -> None:
    seen = [(step.layer, step.layers, step.chunk, step.chunks) for step in steps_of(shared(), S)]
    full = [(layer, 3, chunk, 5) for layer in (1, 2) for chunk in range(1, 6)]
    # the last layer is cut again where the window of 6 begins: 64..69 without outputs, 69..75 with
    assert seen == full + [(3, 3, chunk, 6) for chunk in range(1, 7)]


@pytest.mark.parametrize("options", [{}, {"document_end": 33}, {"all_outputs": True}], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, 16, S, 2048])
def test_progress_rises_to_exactly_one(chunk_size: int, options: dict[str, Any]) -> None:
    fractions = [step.fraction for step in steps_of(shared().with_prefill(chunk_size=chunk_size), S, **options)]
    assert all(0 < before < after for before, after in pairwise(fractions))
    assert fractions[-1] == 1.0


def test_the_estimate_of_the_time_left_ends_at_zero() -> None:
    estimates = [step.eta_seconds for step in steps_of(shared(), S)]
    assert all(estimate >= 0 for estimate in estimates)
    assert estimates[-1] == 0


@pytest.mark.parametrize("at", [1, 4, 7, 15])
@pytest.mark.parametrize("call", ["prefill", "generate", "stream"])
def test_cancelling_stops_within_one_chunk_step_and_the_engine_goes_on(call: str, at: int) -> None:
    engine, cancel, seen = shared(), threading.Event(), []
    expected = engine.generate(random_prompt(S), max_new_tokens=6).token_ids

    def stop(step: Progress) -> None:
        seen.append(step)
        if len(seen) == at:
            cancel.set()

    with pytest.raises(Cancelled, match="stopped on request"):
        result = getattr(engine, call)(random_prompt(S), progress=stop, cancel=cancel)
        if call == "stream":
            list(result)
    assert len(seen) == at
    assert engine.generate(random_prompt(S), max_new_tokens=6).token_ids == expected


def test_a_request_cancelled_beforehand_does_no_step() -> None:
    cancel, seen = threading.Event(), []
    cancel.set()
    with pytest.raises(Cancelled):
        shared().prefill(random_prompt(S), progress=seen.append, cancel=cancel)
    assert seen == []


def test_cancelling_while_decoding_stops_at_the_next_token() -> None:
    cancel = threading.Event()
    stream = with_text().stream("hello", max_new_tokens=100, cancel=cancel)
    next(stream)
    cancel.set()
    with pytest.raises(Cancelled):
        list(stream)
    assert stream.generation is None


def test_a_waiting_request_can_be_cancelled() -> None:
    engine, entered, go_on, cancel = shared(), threading.Event(), threading.Event(), threading.Event()

    def hold(step: Progress) -> None:
        entered.set()
        go_on.wait(300)

    first = threading.Thread(target=engine.prefill, args=(random_prompt(S),), kwargs={"progress": hold})
    first.start()
    try:
        assert entered.wait(300)
        threading.Timer(0.1, cancel.set).start()
        with pytest.raises(Cancelled, match="while waiting"):
            engine.prefill(random_prompt(20), cancel=cancel)
    finally:
        go_on.set()
        first.join()
    assert engine._open().lock.waiting == 0


def test_an_error_in_the_progress_callback_reaches_the_caller_and_frees_the_engine() -> None:
    def fail(step: Progress) -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            shared().generate(random_prompt(S), progress=fail)
    assert shared()._open().lock.waiting == 0
    shared().generate(random_prompt(S), max_new_tokens=1)


# --- threads and streams --------------------------------------------------------------------------------


def test_threads_get_what_they_would_get_alone() -> None:
    engine = shared()
    prompts = [random_prompt(length, seed=length) for length in (30, 75, 110)]
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4}
    alone = [engine.generate(prompt, **options).token_ids for prompt in prompts]
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        found[number] = [engine.generate(prompts[number], **options).token_ids for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(3)] == [[tokens] * 3 for tokens in alone]


def test_interleaved_streams_do_not_mix() -> None:
    engine, prompts = with_text(), ["first prompt", "a second, longer prompt than the first"]
    alone = [engine.generate(prompt, max_new_tokens=15) for prompt in prompts]
    streams = [engine.stream(prompt, max_new_tokens=15) for prompt in prompts]
    open_streams = list(streams)
    while open_streams:
        for stream in list(open_streams):
            if next(stream, None) is None:
                open_streams.remove(stream)
    for stream, expected in zip(streams, alone, strict=True):
        assert stream.generation is not None
        assert stream.generation.token_ids == expected.token_ids
        assert stream.generation.text == expected.text


def test_an_abandoned_stream_blocks_nobody() -> None:
    engine = with_text()
    expected = engine.generate("hello", max_new_tokens=5).token_ids
    abandoned = engine.stream("something else", max_new_tokens=50)
    next(abandoned)
    assert engine.generate("hello", max_new_tokens=5).token_ids == expected
    abandoned.close()
    assert list(abandoned) == []
    assert engine.generate("hello", max_new_tokens=5).token_ids == expected


def test_a_stream_frees_its_cache_when_it_is_closed() -> None:
    before = {id(cache) for cache in _live_caches()}
    stream = with_text().stream("hello", max_new_tokens=50)
    next(stream)
    caches = [weakref.ref(cache) for cache in _live_caches() if id(cache) not in before]
    assert len(caches) == 1
    stream.close()
    gc.collect()
    assert caches[0]() is None


def _live_caches() -> list[CompressedCache]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is CompressedCache]


@pytest.mark.parametrize("grad", [True, False])
def test_the_consumers_grad_mode_is_its_own(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        modes = set()
        for _ in with_text().stream("hello", max_new_tokens=8):
            modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        with_text().generate("hello", max_new_tokens=2)
        with_text().prefill([5, 6, 7])
        modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    assert modes == {(grad, False)}


def test_the_results_can_be_used_with_autograd() -> None:
    prefilled = shared().prefill(random_prompt(30))
    scale = torch.ones(1, requires_grad=True)
    (prefilled.logits * scale).sum().backward()
    assert scale.grad is not None


# --- life cycle -----------------------------------------------------------------------------------------


def test_engines_with_other_options_share_the_weights() -> None:
    engine = make()
    other = engine.with_prefill(chunk_size=7, kept_tokens=30)
    assert other.model is engine.model
    places = [parameter.data_ptr() for parameter in engine.model.parameters()]
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == places
    assert (other.config.chunk_size, other.config.kept_tokens, other.config.window_size) == (7, 30, 6)
    assert engine.config == CONFIG
    assert other.prefill(random_prompt(S)).cache.kept_tokens == 30
    assert engine.prefill(random_prompt(S)).cache.kept_tokens == 20


def test_with_prefill_takes_a_whole_config() -> None:
    config = PrefillConfig(chunk_size=9, kept_tokens=33, window_size=5)
    assert shared().with_prefill(config).config == config
    assert shared().with_prefill(config, kept_tokens=44).config == config.replace(kept_tokens=44)


def test_with_prefill_refuses_unknown_and_impossible_options() -> None:
    with pytest.raises(ConfigError, match="unknown prefill option 'chunk'"):
        shared().with_prefill(chunk=7)
    with pytest.raises(ConfigError, match="kept_tokens=3 must be at least"):
        shared().with_prefill(kept_tokens=3)
    with pytest.raises(ConfigError, match="schedule='x' is unknown"):
        shared().with_prefill(schedule="x")


def test_a_closed_engine_says_so_and_the_others_go_on() -> None:
    engine = make()
    other = engine.with_prefill(chunk_size=7)
    engine.close()
    engine.close()
    calls = [
        lambda: engine.generate([5, 6]),
        lambda: engine.stream([5, 6]),
        lambda: engine.prefill([5, 6]),
        lambda: engine.with_prefill(chunk_size=7),
        lambda: engine.model,
        lambda: engine.tokenizer,
        lambda: engine.name,
        lambda: engine.shape,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="this engine was closed"):
            call()
    assert len(other.generate(random_prompt(20), max_new_tokens=3).token_ids) == 3


def test_the_weights_are_freed_when_the_last_engine_is_closed() -> None:
    model = tiny_model()
    alive = weakref.ref(model)
    with TideKV(model, prefill=CONFIG) as engine:
        del model
        other = engine.with_prefill(chunk_size=7)
        engine.generate(random_prompt(S), max_new_tokens=3)
        prefilled = other.prefill(random_prompt(S))
    gc.collect()
    assert alive() is not None
    other.close()
    gc.collect()
    assert alive() is None
    assert prefilled.cache.nbytes > 0


def test_closing_in_the_middle_of_a_stream_ends_it_with_a_closed_error() -> None:
    engine = TideKV(tiny_model(vocab_size=259), byte_tokenizer(), prefill=CONFIG)
    stream = engine.stream("hello", max_new_tokens=50)
    next(stream)
    engine.close()
    with pytest.raises(ClosedError):
        list(stream)


# --- bad input ------------------------------------------------------------------------------------------


def test_too_long_a_prompt_is_refused_with_both_sizes_before_any_work() -> None:
    engine, seen = TideKV(tiny_model(), prefill=CONFIG, context_window=100), []
    for call in (engine.generate, engine.stream):
        with pytest.raises(
            ContextOverflowError, match=r"90 prompt tokens \+ 11 for the answer exceed .* 100;"
        ) as caught:
            call(random_prompt(90), max_new_tokens=11, progress=seen.append)
        assert (caught.value.prompt_tokens, caught.value.limit) == (101, 100)
    with pytest.raises(ContextOverflowError, match="101 prompt tokens"):
        engine.prefill(random_prompt(101), progress=seen.append)
    assert seen == []
    assert len(engine.generate(random_prompt(90), max_new_tokens=10).token_ids) <= 10
    engine.prefill(random_prompt(100))


def test_the_models_own_window_is_the_limit_by_default() -> None:
    engine = make(max_position_embeddings=64)
    assert engine.context_window == 64
    with pytest.raises(ContextOverflowError, match="the context window of 64"):
        engine.prefill(random_prompt(65))


@pytest.mark.parametrize(("ids", "wrong"), [([5, VOCABULARY], VOCABULARY), ([-1, 5], -1), ([5, 10**9], 10**9)])
@pytest.mark.parametrize("call", ["generate", "stream", "prefill"])
def test_ids_outside_of_the_vocabulary_are_named_at_the_call(call: str, ids: list[int], wrong: int) -> None:
    with pytest.raises(ConfigError, match=f"token id {wrong} is outside the vocabulary of 97"):
        getattr(shared(), call)(ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "the prompt is empty"), ([], "non-empty list"), ("text", "no tokenizer"), ([5.0, 6.0], "token ids")],
    ids=str,
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_prompts_without_use_are_named_at_the_call(call: str, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(shared(), call)(prompt)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens"),
        (torch.zeros(0, dtype=torch.long), "the prompt has no tokens"),
        (torch.ones(2, 5, dtype=torch.long), r"one prompt .* not .*2, 5"),
        ([[5, 6], [7, 8]], r"one prompt .* not .*2, 2"),
        ([5.5, 6.0], "whole numbers"),
        (torch.tensor([5.0]), "whole numbers"),
        (torch.tensor(5), "one prompt"),
    ],
    ids=["empty", "empty tensor", "batch", "nested lists", "floats", "float tensor", "a single number"],
)
def test_ids_that_are_not_one_prompt_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shared().prefill(ids)


def test_a_batch_of_prompts_is_not_run_together_as_one() -> None:
    with pytest.raises(ConfigError, match="one prompt"):
        shared().generate(torch.ones(2, 5, dtype=torch.long), max_new_tokens=1)


def test_ids_may_be_a_list_or_a_tensor_with_or_without_a_batch_axis() -> None:
    ids = random_prompt(30)
    expected = shared().prefill(ids).logits
    for given in (torch.tensor(ids), torch.tensor([ids]), torch.tensor(ids, dtype=torch.int32), tuple(ids)):
        assert torch.equal(shared().prefill(given).logits, expected)
    tokens = shared().generate(ids, max_new_tokens=3).token_ids
    assert shared().generate(torch.tensor([ids]), max_new_tokens=3).token_ids == tokens


@pytest.mark.parametrize("document_end", [-1, 31])
def test_a_document_end_outside_of_the_prompt_is_named(document_end: int) -> None:
    with pytest.raises(ConfigError, match=f"document_end={document_end} must lie within the prompt of 30 tokens"):
        shared().prefill(random_prompt(30), document_end=document_end)


@pytest.mark.parametrize("reserve", [-1, 1.5])
def test_an_impossible_reserve_is_named(reserve: Any) -> None:
    with pytest.raises(ConfigError, match=f"reserve={reserve} must be a whole number of at least 0"):
        shared().prefill(random_prompt(30), reserve=reserve)


@pytest.mark.parametrize("context_window", [0, -5, 10.5])
def test_an_impossible_context_window_is_named(context_window: Any) -> None:
    with pytest.raises(ConfigError, match=f"context_window={context_window} must be a whole number of at least 1"):
        TideKV(tiny_model(), context_window=context_window)


# --- metrics --------------------------------------------------------------------------------------------


def test_metrics_are_json_and_say_what_happened() -> None:
    generation = shared().generate(random_prompt(S), max_new_tokens=9)
    metrics = generation.metrics
    data = json.loads(json.dumps(metrics.as_dict(), allow_nan=False))
    assert set(data) == set(metrics.__dataclass_fields__)
    assert data["prompt_tokens"] == S
    assert data["new_tokens"] == len(generation.token_ids)
    assert (data["chunk_size"], data["kept_tokens"], data["selector"]) == (16, 20, "snapkv")
    assert (data["schedule"], data["attention"], data["reused_prefix_tokens"]) == ("tidekv", "auto", 0)
    assert data["cache_bytes"] == 3 * 2 * 2 * 20 * 8 * 4  # after prefill: decoded tokens not counted
    assert 0 <= data["compress_seconds"] <= data["prefill_seconds"] <= data["ttft_seconds"]
    assert data["decode_tokens_per_second"] > 0
    assert set(data["peaks"]) >= {"process", "allocated", "reserved"}
    assert set(data["components"]) == {
        "weights", "ready_layer", "active_kv", "bridge", "activations", "temporary", "compressed_cache",
        "document_store",
    }  # fmt: skip


def test_an_automatic_chunk_size_is_chosen_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the memory that is free at the moment: asked twice, a store's key and its numbers could differ."""
    chosen: list[int] = []

    def choose(*_: object) -> int:
        chosen.append(7 + len(chosen))
        return chosen[-1]

    monkeypatch.setattr("tidekv_llm.engine.run.choose_chunk_size", choose)
    engine = with_text().with_prefill(chunk_size="auto").with_prefix_cache(1 << 20)
    assert [engine.generate("a" * 80, max_new_tokens=1).metrics.chunk_size for _ in range(2)] == chosen == [7, 8]


def test_automatic_chunk_sizes_are_reported_as_numbers() -> None:
    metrics = shared().with_prefill(chunk_size="auto").prefill(random_prompt(S)).metrics
    assert isinstance(metrics.chunk_size, int)
    assert metrics.chunk_size >= 1


def test_time_to_first_token_does_not_count_the_wait_for_others() -> None:
    """Inequalities between clocks read here: they hold however slow or busy the machine is."""
    engine, entered, asked, let_go = shared(), threading.Event(), threading.Event(), [0.0]

    def hold(step: Progress) -> None:
        entered.set()
        if not let_go[0]:
            asked.wait()
            time.sleep(0.2)
            let_go[0] = time.perf_counter()

    first = threading.Thread(target=engine.prefill, args=(random_prompt(S),), kwargs={"progress": hold})
    first.start()
    entered.wait()
    asked.set()
    metrics = engine.generate(random_prompt(4), max_new_tokens=1).metrics
    end = time.perf_counter()
    first.join()
    assert metrics.ttft_seconds <= end - let_go[0]


def test_the_decode_rate_does_not_count_the_readers_time() -> None:
    begin, slept, deltas = time.perf_counter(), 0.0, 0
    stream = with_text().stream("hello", max_new_tokens=20, temperature=1.0, seed=1)
    for _ in stream:
        deltas += 1
        asleep = time.perf_counter()
        time.sleep(0.05)
        slept += time.perf_counter() - asleep
    assert deltas > 3
    assert stream.metrics is not None
    decoded = (stream.metrics.new_tokens - 1) / stream.metrics.decode_tokens_per_second
    assert decoded <= time.perf_counter() - begin - slept
