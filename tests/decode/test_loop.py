"""The decode loop: probabilities, ends and positions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.decode.tokenizers_for_tests import byte_tokenizer, ids_of
from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.decode.loop import DecodeAdapter, decode_tokens
from tidekv_llm.hf import Decoder

pytestmark = pytest.mark.usefixtures("one_token_a_step")

BYTES = 3 + 256
EOS = 2


@functools.cache
def engine_of(family: str = "llama") -> TideKV:
    return TideKV(tiny_model(family), prefill=PrefillConfig(chunk_size=16))


class Script:
    """Makes an engine say given tokens: the model's head is replaced by a list of next tokens."""

    def __init__(self, *tokens: int, vocabulary: int = BYTES) -> None:
        self.tokens, self.vocabulary, self.asked = list(tokens), vocabulary, 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.vocabulary)
        logits[..., self.tokens[self.asked]] = 1.0
        self.asked += 1
        return logits


def scripted(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> tuple[TideKV, Script]:
    """An engine with a byte tokenizer whose decoder's logits follow a script."""
    engine = TideKV(tiny_model(vocab_size=BYTES), byte_tokenizer(), prefill=PrefillConfig(chunk_size=16))
    script = Script(*tokens)
    monkeypatch.setattr(engine._open().decoder, "logits", script)
    return engine, script


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "exaone4"])
def test_log_probabilities_equal_a_fresh_prefills_at_every_step(family: str) -> None:
    engine, ids = engine_of(family), random_prompt(33)
    prefilled = engine.prefill(ids, reserve=12)
    adapter = DecodeAdapter(Decoder(engine.model), prefilled.cache, AttentionDispatch())
    logits = prefilled.logits
    for _ in range(12):
        token = int(logits.argmax())
        ids = [*ids, token]
        logits = adapter.step(torch.tensor([[token]]))[0]
        fresh = engine.prefill(ids).logits
        torch.testing.assert_close(logits.log_softmax(-1), fresh.log_softmax(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kept_tokens", [6, 4096])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 40])
def test_greedy_decoding_of_short_and_long_prompts(length: int, kept_tokens: int) -> None:
    engine = engine_of().with_prefill(kept_tokens=kept_tokens, window_size=4, sinks=1)
    ids = random_prompt(length)
    generation = engine.generate(ids, max_new_tokens=8)
    if length <= kept_tokens:
        with torch.no_grad():
            own = engine.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        expected = own[0, length:].tolist()
        assert generation.token_ids == [token for token in expected if token != EOS]
    assert generation.metrics.prompt_tokens == length
    assert generation.metrics.new_tokens == len(generation.token_ids)


def test_end_of_sequence_as_the_first_token_gives_empty_text(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, script = scripted(monkeypatch, EOS)
    generation = engine.generate("hello", max_new_tokens=20)
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("", [], "stop")
    assert generation.metrics.new_tokens == 0
    assert generation.metrics.decode_tokens_per_second == 0
    assert script.asked == 1


def test_end_of_sequence_later_stops_and_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = scripted(monkeypatch, *ids_of("abc"), EOS)
    generation = engine.generate("hello", max_new_tokens=20)
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("abc", ids_of("abc"), "stop")


@pytest.mark.parametrize("eos", [3 + ord("b"), [7, 3 + ord("b")]])
def test_every_end_token_of_the_generation_config_stops(monkeypatch: pytest.MonkeyPatch, eos: Any) -> None:
    engine, _ = scripted(monkeypatch, *ids_of("abc"))
    engine.model.generation_config.eos_token_id = eos
    assert engine.generate("hello", max_new_tokens=3).text == "a"


def test_one_new_token_needs_no_step_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, script = scripted(monkeypatch, *ids_of("abc"))
    generation = engine.generate("hello", max_new_tokens=1)
    assert (generation.text, generation.finish_reason) == ("a", "length")
    assert script.asked == 1  # the prefill's


def test_no_step_is_computed_for_a_token_nobody_asked_for() -> None:
    steps = []

    def step(ids: torch.Tensor) -> torch.Tensor:
        steps.append(int(ids))
        return torch.zeros(1, 5)

    tokens = decode_tokens(step, torch.tensor([0.0, 1.0]), lambda logits: int(logits.argmax()), max_new_tokens=3)
    assert list(tokens) == [1, 0, 0]
    assert steps == [1, 0]


def test_stop_strings_cut_the_text_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, script = scripted(monkeypatch, *ids_of("yes\nQ: and more"))
    generation = engine.generate("hello", max_new_tokens=15, stop=["\nQ:"])
    assert (generation.text, generation.finish_reason) == ("yes", "stop")
    assert script.asked == 6
    engine, _ = scripted(monkeypatch, *ids_of("yes\nQ"))
    generation = engine.generate("hello", max_new_tokens=5, stop="\nQ:")
    assert (generation.text, generation.finish_reason) == ("yes\nQ", "length")


def test_a_streams_deltas_are_whole_characters_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve 🌊"
    engine, _ = scripted(monkeypatch, *ids_of(text), EOS)
    stream = engine.stream("hello", max_new_tokens=40)
    deltas = list(stream)
    assert deltas == [*text]
    assert stream.generation is not None
    assert stream.generation.text == text
    assert stream.metrics is stream.generation.metrics


def test_held_back_text_is_the_streams_last_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = scripted(monkeypatch, *ids_of("ab\nQ"), EOS)
    assert list(engine.stream("hello", stop=["\nQ:"])) == ["a", "b", "\nQ"]


def test_without_a_tokenizer_token_ids_come_and_no_text() -> None:
    stream = engine_of().stream(random_prompt(10), max_new_tokens=4)
    assert list(stream) == []
    assert stream.generation is not None
    assert stream.generation.text == ""
    assert len(stream.generation.token_ids) == 4


def test_sampling_is_repeatable_with_a_seed_and_equals_the_stream() -> None:
    engine, ids = engine_of(), random_prompt(20)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.95, "top_k": 50}
    first = engine.generate(ids, seed=1, **options)
    assert engine.generate(ids, seed=1, **options).token_ids == first.token_ids
    assert engine.generate(ids, seed=2, **options).token_ids != first.token_ids
    stream = engine.stream(ids, seed=1, **options)
    assert list(stream) == []
    assert stream.generation is not None
    assert stream.generation.token_ids == first.token_ids


def test_decoding_stays_on_the_reserved_storage() -> None:
    engine = engine_of().with_prefill(kept_tokens=24)
    prefilled = engine.prefill(random_prompt(40), reserve=6)
    places = [layer.keys.data_ptr() for layer in prefilled.cache.layers]
    adapter = DecodeAdapter(Decoder(engine.model), prefilled.cache, AttentionDispatch())
    for _ in range(6):
        adapter.step(torch.tensor([[5]]))
    assert [layer.keys.data_ptr() for layer in prefilled.cache.layers] == places
    assert prefilled.cache.get_seq_length() == 46
