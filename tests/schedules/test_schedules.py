"""Every schedule gives logits and a cache that decodes; those without eviction equal the model's own forward."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.compress.selectors import KeyDiff
from tidekv_llm.errors import Cancelled, UnsupportedModelError
from tidekv_llm.schedules import schedule_names
from tidekv_llm.schedules.keydiff_online import PAPERS_KEYDIFF

FULL = ("one-shot", "chunked", "tidekv-no-evict", "headinfer", "mini-sequence")
EXACT_PROMPT = (*FULL, "tidekv", "post-prefill", "kivi")
ONLINE = ("block-snapkv", "block-recent", "keydiff-online")
PROMPT = random_prompt(300)


@pytest.fixture(scope="module")
def llm() -> TideKV:
    config = PrefillConfig(chunk_size=64, kept_tokens=48, window_size=8, score_block_size=32)
    return TideKV(tiny_model("llama"), prefill=config)


def own_logits(llm: TideKV, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return llm.model(torch.tensor([prompt])).logits[0, -1].float()


def test_all_schedules_of_the_paper_are_there():
    assert set(schedule_names()) == {*FULL, *ONLINE, "tidekv", "post-prefill", "kivi"}


@pytest.mark.parametrize("schedule", EXACT_PROMPT)
def test_prompt_logits_equal_the_models_own(llm, schedule):
    prefilled = llm.with_prefill(schedule=schedule).prefill(PROMPT)
    torch.testing.assert_close(prefilled.logits, own_logits(llm, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "gemma2", "granite", "gpt_oss"])
@pytest.mark.parametrize("schedule", ["one-shot", "chunked", "headinfer", "tidekv-no-evict", "mini-sequence"])
def test_families_with_windows_caps_and_sinks(family, schedule):
    if (family, schedule) == ("gpt_oss", "mini-sequence"):
        pytest.skip("its MLP returns a tuple: refused, see test_an_mlp_that_cannot_be_split_is_refused")
    llm = TideKV(tiny_model(family), prefill=PrefillConfig(chunk_size=16, kept_tokens=32, schedule=schedule))
    prompt = PROMPT[:50]
    torch.testing.assert_close(llm.prefill(prompt).logits, own_logits(llm, prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", FULL)
def test_decode_equals_the_models_own_generate(llm, schedule):
    expected = llm.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    found = llm.with_prefill(schedule=schedule).generate(PROMPT, max_new_tokens=6, ignore_eos=True).token_ids
    assert found == expected


@pytest.mark.parametrize("schedule", ["one-shot", "chunked", "tidekv-no-evict"])
def test_full_caches_work_in_hf_generate(llm, schedule):
    ids = torch.tensor([PROMPT])
    plain = llm.model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    cache = llm.with_prefill(schedule=schedule).prefill(PROMPT[:-1], reserve=8).cache
    name = llm._open().decoder._cache_argument  # renamed in transformers 5.24
    ours = llm.model.generate(ids, **{name: cache}, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    assert ours.tolist() == plain.tolist()


@pytest.mark.parametrize("schedule", ONLINE)
def test_immediate_eviction_keeps_its_budget_at_true_positions(llm, schedule):
    prefilled = llm.with_prefill(schedule=schedule).prefill(PROMPT)
    for layer in range(3):
        for head in range(2):
            positions = prefilled.cache.positions(layer, head)
            assert positions.shape == (48,)
            assert positions.diff().min() > 0
            assert positions.max() < len(PROMPT)
    if schedule == "block-recent":
        assert prefilled.cache.positions(0, 0).tolist() == list(range(252, 300))
    if schedule == "block-snapkv":
        assert prefilled.cache.positions(1, 1)[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", ONLINE)
def test_immediate_eviction_with_room_for_everything_is_exact(llm, schedule):
    prefilled = llm.with_prefill(schedule=schedule, kept_tokens=300).prefill(PROMPT)
    torch.testing.assert_close(prefilled.logits, own_logits(llm, PROMPT), rtol=1e-4, atol=1e-4)


def test_immediate_eviction_drifts_and_delayed_does_not(llm):
    reference = llm.with_prefill(schedule="one-shot").prefill(PROMPT, all_outputs=True).hidden

    def drift(schedule: str) -> float:
        hidden = llm.with_prefill(schedule=schedule).prefill(PROMPT, all_outputs=True).hidden
        return float((hidden - reference).norm() / reference.norm())

    assert max(drift("tidekv"), drift("chunked"), drift("tidekv-no-evict")) < 1e-5
    assert min(drift("block-snapkv"), drift("block-recent")) > 0.01


@pytest.mark.parametrize("schedule", ONLINE)
def test_sliding_window_layers_keep_exactly_their_window_online(schedule):
    llm = TideKV(tiny_model("mistral"), prefill=PrefillConfig(chunk_size=16, kept_tokens=24, window_size=4))
    prefilled = llm.with_prefill(schedule=schedule).prefill(PROMPT[:100])
    assert prefilled.cache.positions(0, 0).tolist() == list(range(92, 100))
    torch.testing.assert_close(prefilled.logits, own_logits(llm, PROMPT[:100]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_decodes(llm, schedule):
    generation = llm.with_prefill(schedule=schedule).generate(PROMPT, max_new_tokens=5, ignore_eos=True)
    assert len(generation.token_ids) == 5
    assert generation.metrics.schedule == schedule
    assert generation.metrics.cache_bytes > 0


@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize("length", [1, 7])
def test_short_prompts(llm, schedule, length):
    prefilled = llm.with_prefill(schedule=schedule).prefill(PROMPT[:length])
    torch.testing.assert_close(prefilled.logits, own_logits(llm, PROMPT[:length]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_can_be_cancelled(llm, schedule):
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        llm.with_prefill(schedule=schedule).prefill(PROMPT, cancel=cancel)


def test_kivi_stores_two_bits_and_stays_close(llm):
    long = random_prompt(1000)
    full = llm.with_prefill(schedule="tidekv-no-evict").prefill(long).metrics.cache_bytes
    assert llm.with_prefill(schedule="kivi").prefill(long).metrics.cache_bytes < 0.4 * full


@pytest.mark.parametrize("schedule", ["tidekv", "post-prefill", "mini-sequence"])
def test_the_host_bridge_changes_no_logit(llm, schedule):
    near = llm.with_prefill(schedule=schedule).prefill(PROMPT)
    far = llm.with_prefill(schedule=schedule, bridge="host").prefill(PROMPT)
    assert torch.equal(near.logits, far.logits)


@pytest.mark.parametrize("schedule", ["tidekv", "chunked", "post-prefill"])
def test_a_split_mlp_gives_the_same_logits(llm, schedule):
    whole = llm.with_prefill(schedule=schedule).prefill(PROMPT)
    split = llm.with_prefill(schedule=schedule, mlp_chunk_size=10).prefill(PROMPT)
    torch.testing.assert_close(split.logits, whole.logits, rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(llm.model.model.layers[0].mlp)


def test_an_mlp_that_cannot_be_split_is_refused():
    llm = TideKV(tiny_model("gpt_oss"), prefill=PrefillConfig(chunk_size=16, kept_tokens=32, mlp_chunk_size=4))
    with pytest.raises(UnsupportedModelError, match="mlp_chunk_size"):
        llm.prefill(PROMPT[:40])


def test_online_keydiff_is_the_papers_heads_choose_for_themselves() -> None:
    config = PrefillConfig(kept_tokens=60, window_size=8, sinks=2, schedule="keydiff-online")
    cache = TideKV(tiny_model("llama"), prefill=config).prefill(random_prompt(300)).cache
    assert not torch.equal(cache.positions(1, 0), cache.positions(1, 1))
    assert KeyDiff(segment_length=None, share_heads=False) == PAPERS_KEYDIFF
