"""Plain steps give what the model's own layers give, and whatever is not plain is decoded by them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.tiny_models import FAMILIES, random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.decode.loop import LayerByLayer
from tidekv_llm.decode.plain import PlainDecoder
from tidekv_llm.hf import Decoder
from tidekv_llm.layers import NotPlainError, plain_layers

NOT_PLAIN = ("llama4_text",)
PLAIN = [family for family in FAMILIES if family not in NOT_PLAIN]
CONFIG = PrefillConfig(chunk_size=16, kept_tokens=24, window_size=4, sinks=2)
CACHES: dict[str, dict[str, Any]] = {
    "rectangular": {},
    "flattened": {"layout": "flattened"},
    "ada": {"head_budget": "ada"},
    "8 bits": {"kv_bits": 8, "kv_residual": 4},
    "4 bits": {"kv_bits": 4, "kv_residual": 4},
    "nothing evicted": {"kept_tokens": 4096, "schedule": "one-shot"},
    "on the host, by heads": {"schedule": "headinfer"},
}


@functools.cache
def engine_of(family: str) -> TideKV:
    return TideKV(tiny_model(family), prefill=CONFIG)


def plain_of(engine: TideKV) -> PlainDecoder:
    steps, note = engine._open().steps()
    assert isinstance(steps, PlainDecoder), note
    return steps


def compared(family: str, options: dict[str, Any], count: int) -> None:
    """Greedy tokens of both ways, each from a cache of its own, on the generic way's tokens."""
    engine = engine_of(family).with_prefill(**options)
    decoder, attention = engine.decoder, engine.decoder.attention("auto")
    ours, own = plain_of(engine), LayerByLayer(engine.decoder)
    prompt = random_prompt(60)
    caches = [engine.prefill(prompt, reserve=count).cache for _ in range(2)]
    row, own_row = ours.row(caches[0], attention), own.row(caches[1], attention)
    token = int(engine.prefill(prompt).logits.argmax())
    for _ in range(count):
        expected = own.step([own_row], [[token]])[0]
        found = ours.step([row], [[token]])[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        token = int(expected.argmax())
        assert int(found.argmax()) == token
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 60 + count
    assert decoder.num_layers == len(ours.layers)


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_those_of_the_models_own_layers_in_every_layout(cache: str) -> None:
    compared("llama", CACHES[cache], 64)


@pytest.mark.parametrize("family", PLAIN)
def test_tokens_equal_those_of_the_models_own_layers_in_every_family(family: str) -> None:
    compared(family, {}, 16)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["rectangular", "flattened", "8 bits", "4 bits"])
@pytest.mark.parametrize("family", PLAIN)
def test_64_tokens_equal_those_of_the_models_own_layers(family: str, cache: str) -> None:
    compared(family, CACHES[cache], 64)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "cohere"])
def test_several_tokens_and_several_answers_at_once_equal_one_by_one(family: str, cache: str) -> None:
    engine = engine_of(family).with_prefill(**CACHES[cache])
    ours, attention = plain_of(engine), engine.decoder.attention("auto")
    prompts, tokens = [random_prompt(60), random_prompt(35, seed=1)], [[5, 6, 7], [8]]

    def rows() -> list[Any]:
        return [ours.row(engine.prefill(ids, reserve=4).cache, attention) for ids in prompts]

    together = ours.step(rows(), tokens)
    alone = [ours.step([row], [[token]]) for row, mine in zip(rows(), tokens, strict=True) for token in mine]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_rolled_back_leaves_no_trace(cache: str) -> None:
    engine = engine_of("mistral" if cache == "rectangular" else "llama").with_prefill(**CACHES[cache])
    ours, attention = plain_of(engine), engine.decoder.attention("auto")
    once, tried = (ours.row(engine.prefill(random_prompt(60), reserve=8).cache, attention) for _ in range(2))
    ours.step([tried], [[5, 9, 9, 9]])
    for layer in tried.cache.layers:
        layer.rollback(3)
    ours.step([once], [[5]])
    assert once.cache.nbytes == tried.cache.nbytes
    torch.testing.assert_close(ours.step([tried], [[6]]), ours.step([once], [[6]]), rtol=1e-4, atol=1e-4)


def test_answers_longer_than_the_tables_and_the_reserved_room_go_on() -> None:
    compared("llama", {}, 2)
    engine = engine_of("llama")
    ours, attention = plain_of(engine), engine.decoder.attention("auto")
    own = LayerByLayer(engine.decoder)
    caches = [engine.prefill(random_prompt(20)).cache for _ in range(2)]  # nothing reserved
    row, own_row = ours.row(caches[0], attention), own.row(caches[1], attention)
    tokens = random_prompt(300)
    for token in tokens:
        found = ours.step([row], [[token]])
    torch.testing.assert_close(found[0], own.step([own_row], [tokens])[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", NOT_PLAIN)
def test_whatever_is_not_plain_is_decoded_by_its_own_layers_with_a_note(family: str) -> None:
    generation = engine_of(family).generate(random_prompt(20), max_new_tokens=3)
    assert any("the model's own layers" in note for note in generation.metrics.notes)
    assert not any("own layers" in note for note in engine_of("llama").generate([5, 6]).metrics.notes)


def test_a_layer_that_differs_by_a_factor_is_noticed() -> None:
    model = tiny_model("llama")
    layer: Any = model.model.layers[1]
    own = layer.mlp.forward
    layer.mlp.forward = lambda hidden: 1.05 * own(hidden)  # no name says so
    engine = TideKV(model)
    steps, note = engine._open().steps()
    assert isinstance(steps, LayerByLayer)
    assert "differ by 0.0" in note


def test_modules_exchanged_after_loading_are_used() -> None:
    engine = TideKV(tiny_model("llama"))
    before = engine.generate(random_prompt(20), max_new_tokens=8).token_ids
    layer: Any = engine.model.model.layers[0]
    layer.mlp = tiny_model("llama", seed=5).model.layers[0].mlp
    fresh = TideKV(engine.model).generate(random_prompt(20), max_new_tokens=8).token_ids
    assert engine.generate(random_prompt(20), max_new_tokens=8).token_ids == fresh != before


def test_unknown_parts_are_named() -> None:
    model = tiny_model("llama")
    model.model.layers[2].extra = torch.nn.Linear(2, 2)
    with pytest.raises(NotPlainError, match="consists of extra, input_layernorm"):
        plain_layers(Decoder(model), lambda: True)
