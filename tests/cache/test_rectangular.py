"""The compressed cache: storage, lengths, and what ``model.generate()`` makes of it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import EAGER, WINDOW, random_prompt, tiny_model
from tidekv_llm import CompressedCache, PrefillConfig, TideKV
from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.cache.rectangular import RectangularLayer
from tidekv_llm.decode.loop import DecodeAdapter
from tidekv_llm.hf import Decoder

S = 45
EVICT = PrefillConfig(chunk_size=16, kept_tokens=12, window_size=4, sinks=2, kernel_size=5)
KEEP = PrefillConfig(chunk_size=16)
FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "gemma2",
    "gemma3 mixed",
    "gpt_oss",
    "exaone4",
    "cohere",
    "granite",
    "phi3",
]


@functools.cache
def engine_of(family: str) -> TideKV:
    if family == "gemma3 mixed":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return TideKV(tiny_model("gemma3_text", layer_types=kinds), prefill=KEEP)
    return TideKV(tiny_model(family), prefill=KEEP)


def engine(family: str, config: PrefillConfig) -> TideKV:
    options = {name: getattr(config, name) for name in PrefillConfig.__dataclass_fields__}
    return engine_of(family).with_prefill(**options)


def cache_argument(model: Any) -> str:
    """``cache`` from 5.24 on, ``past_key_values`` before."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def stored(reserve: int = 0, window: int | None = None) -> tuple[RectangularLayer, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 2, 20, 4), torch.randn(1, 2, 20, 6)
    kept = torch.tensor([[[0, 3, 7, 19], [1, 2, 18, 19]]])
    return RectangularLayer(keys, values, kept, reserve=reserve, window=window), keys, values, kept


def test_a_layer_holds_the_kept_rows_and_their_positions() -> None:
    layer, keys, values, kept = stored()
    cache = CompressedCache()
    cache.commit(layer)
    for head in range(2):
        rows = kept[0, head]
        assert cache.positions(0, head).dtype == torch.int64
        assert torch.equal(cache.positions(0, head), rows)
        assert torch.equal(cache.keys(0, head), keys[0, head, rows])
        assert torch.equal(cache.values(0, head), values[0, head, rows])


@pytest.mark.parametrize("reserve", [0, 3, 100])
def test_bytes_are_those_of_the_slots_in_use(reserve: int) -> None:
    layer = stored(reserve)[0]
    assert layer.nbytes == 4 * 2 * (4 + 6) * 4
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 6))
    assert layer.nbytes == 7 * 2 * (4 + 6) * 4


def test_appending_into_reserved_room_moves_nothing() -> None:
    layer = stored(reserve=5)[0]
    place, before = layer.keys.data_ptr(), layer.keys[:, :, :4].clone()
    for count in (1, 3, 1):
        keys, values = layer.update(torch.full((1, 2, count, 4), 7.0), torch.full((1, 2, count, 6), 8.0))
    assert keys.shape == (1, 2, 9, 4)
    assert values.shape == (1, 2, 9, 6)
    assert keys.data_ptr() == layer.keys.data_ptr() == place
    assert torch.equal(keys[:, :, :4], before)
    assert (keys[:, :, 4:] == 7).all()
    assert (values[:, :, 4:] == 8).all()
    assert layer.positions()[0, 1].tolist() == [1, 2, 18, 19, 20, 21, 22, 23, 24]
    assert (layer.get_seq_length(), layer.physical) == (25, 9)


def test_appending_without_room_copies_rarely_and_loses_nothing() -> None:
    layer, keys, *_ = stored()
    places = set()
    for number in range(200):
        layer.update(torch.full((1, 2, 1, 4), float(number)), torch.full((1, 2, 1, 6), float(number)))
        places.add(layer.keys.data_ptr())
    assert len(places) < 15
    assert torch.equal(layer.keys[0, 0, :4], keys[0, 0, [0, 3, 7, 19]])
    assert layer.keys[0, 1, 4:204, 0].tolist() == list(range(200))
    assert layer.values[0, 1, 4:204, 5].tolist() == list(range(200))


def test_reserving_makes_later_appends_free_of_copies() -> None:
    layer = stored()[0]
    cache = CompressedCache()
    cache.commit(layer)
    cache.reserve(50)
    place = layer.keys.data_ptr()
    for _ in range(50):
        layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 6))
    assert layer.keys.data_ptr() == place


def test_reset_forgets_the_decoded_tokens_only() -> None:
    layer = stored(reserve=5)[0]
    before = layer.keys[:, :, :4].clone()
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 6))
    layer.reset()
    assert (layer.get_seq_length(), layer.physical) == (20, 4)
    assert torch.equal(layer.keys[:, :, :4], before)
    assert layer.positions()[0, 0].tolist() == [0, 3, 7, 19]


@pytest.mark.parametrize("config", [KEEP, EVICT], ids=["all kept", "evicted"])
def test_the_engines_cache_bytes_are_exact(config: PrefillConfig) -> None:
    prefilled = engine("gemma3 mixed", config).prefill(random_prompt(S), reserve=9)
    full = S if config is KEEP else 12
    assert prefilled.cache.nbytes == (WINDOW + full + WINDOW) * 2 * 2 * 8 * 4
    assert prefilled.metrics.cache_bytes == prefilled.cache.nbytes
    assert prefilled.metrics.kept_tokens == prefilled.cache.kept_tokens == full


@pytest.mark.parametrize("config", [KEEP, EVICT], ids=["all kept", "evicted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_own_generate_on_the_cache_equals_our_decode_loop(family: str, config: PrefillConfig) -> None:
    llm, ids = engine(family, config), random_prompt(S)
    ours = []
    prefilled = llm.prefill(ids)
    step = DecodeAdapter(Decoder(llm.model), prefilled.cache, AttentionDispatch())
    token = int(prefilled.logits.argmax())
    for _ in range(10):
        ours.append(token)
        token = int(step.step(torch.tensor([[token]]))[0].argmax())
    prefilled = llm.prefill(ids)
    inputs = torch.tensor([[*ids, ours[0]]])
    generated = llm.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=-1,
        **{cache_argument(llm.model): prefilled.cache},
    )
    assert generated[0, S:].tolist() == ours
    assert prefilled.cache.positions(1, 0).tolist()[-9:] == list(range(S, S + 9))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3 mixed", "exaone4"])
def test_models_own_generate_with_everything_kept_equals_plain_generate(family: str) -> None:
    llm, ids = engine(family, KEEP), random_prompt(S)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": -1}
    plain = llm.model.generate(torch.tensor([ids]), max_new_tokens=10, **options)
    prefilled = llm.prefill(ids)
    first = int(prefilled.logits.argmax())
    ours = llm.model.generate(
        torch.tensor([[*ids, first]]),
        max_new_tokens=9,
        **options,
        **{cache_argument(llm.model): prefilled.cache},
    )
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("config", [KEEP, EVICT], ids=["all kept", "evicted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_at_once_are_as_one_by_one_in_our_loop(family: str, config: PrefillConfig) -> None:
    llm, ids, new = engine(family, config), random_prompt(S), random_prompt(3, seed=5)

    def appended(*parts: list[int]) -> tuple[Tensor, Tensor]:
        cache = llm.prefill(ids).cache
        adapter = DecodeAdapter(Decoder(llm.model), cache, AttentionDispatch())
        for part in parts:
            logits = adapter.step(torch.tensor([part]))
        return logits, cache.keys(2, 1)

    one_by_one, keys = appended(*[[token] for token in new])
    at_once, keys_at_once = appended(new)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(keys_at_once, keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [KEEP, EVICT], ids=["all kept", "evicted"])
@pytest.mark.parametrize(
    ("family", "attention"),
    # transformers has no exact sdpa for softcap and attention sinks
    [(family, kind) for family in FAMILIES for kind in ("eager", "sdpa") if family not in EAGER or kind == "eager"],
)
def test_several_tokens_at_once_are_as_one_by_one_in_the_models_forward(
    family: str, config: PrefillConfig, attention: str
) -> None:
    llm, ids, new = engine(family, config), random_prompt(S), random_prompt(3, seed=5)
    model, before = llm.model, llm.model.config._attn_implementation
    name = cache_argument(model)

    def appended(*parts: list[int]) -> Tensor:
        cache = llm.prefill(ids).cache
        return torch.cat([model(torch.tensor([part]), **{name: cache}).logits for part in parts], dim=1)

    model.set_attn_implementation(attention)
    try:
        with torch.no_grad():
            one_by_one, at_once = appended(*[[token] for token in new]), appended(new)
    finally:
        model.set_attn_implementation(before)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3 mixed"])
def test_decoded_tokens_stand_at_their_true_positions(family: str) -> None:
    """Evicted rows play no part: with all kept, the keys of appended tokens are those of a longer prefill."""
    ids, new = random_prompt(S), random_prompt(4, seed=5)
    llm = engine(family, EVICT)
    cache = llm.prefill(ids).cache
    adapter = DecodeAdapter(Decoder(llm.model), cache, AttentionDispatch())
    for token in new:
        adapter.step(torch.tensor([[token]]))
    longer = engine(family, KEEP).prefill([*ids, *new]).cache
    # layer 0's keys depend on the token and its position alone
    torch.testing.assert_close(cache.keys(0, 0)[-4:], longer.keys(0, 0)[-4:], rtol=1e-5, atol=1e-5)
    assert cache.positions(0, 0)[-4:].tolist() == [S, S + 1, S + 2, S + 3]
