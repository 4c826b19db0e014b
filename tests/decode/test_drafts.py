"""Drafts from the document: the same tokens, sooner."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.decode.tokenizers_for_tests import byte_tokenizer, ids_of
from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.decode.drafts import LEAST_MATCH, MOST_MATCH, Drafts
from tidekv_llm.errors import ConfigError

CONFIG = PrefillConfig(chunk_size=16, kept_tokens=24, window_size=4, sinks=2)
CACHES: dict[str, dict[str, Any]] = {
    "rectangular": {},
    "flattened": {"layout": "flattened"},
    "ada": {"head_budget": "ada"},
    "8 bits": {"kv_bits": 8, "kv_residual": 4},
    "4 bits": {"kv_bits": 4, "kv_residual": 4},
    "on the host, by heads": {"schedule": "headinfer"},
}


@functools.cache
def engine_of(family: str = "llama") -> TideKV:
    return TideKV(tiny_model(family), prefill=CONFIG)


def bigram_engine(text: str) -> TideKV:
    """A model that says ``text`` after its first character, whatever the rest of the prompt: every layer adds nothing.

    The head's row of a token is the embedding of the token before it, so no character may occur twice.
    """
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=3 + 256, hidden_size=512, num_attention_heads=8)
    ids = ids_of(text)
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(3 + 256, 512))
        model.lm_head.weight.zero_()
        model.lm_head.weight[ids[1:]] = model.model.embed_tokens.weight[ids[:-1]]
    return TideKV(model, tokenizer, prefill=PrefillConfig(chunk_size=64))


# --- what is proposed ---


def grown(ids: Sequence[int], most: int = 8, prompt: int = 0) -> Drafts:
    drafts = Drafts(ids[: prompt or len(ids)], most)
    for token in ids[prompt or len(ids) :]:
        drafts.push(token)
    return drafts


def test_what_followed_the_last_tokens_is_proposed() -> None:
    assert grown([7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 0, 1, 2, 3]).propose(8) == [4, 5, 6, 8]
    assert grown([7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 0, 1, 2, 3]).propose(2) == [4, 5]
    assert grown([7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 1, 2, 3]).propose(8) == []
    assert grown([1, 2, 3]).propose(8) == grown([1]).propose(8) == []


def test_the_place_that_agrees_longest_counts_and_the_later_of_equals() -> None:
    assert grown([5, 0, 1, 2, 3, 10, 6, 0, 1, 2, 3, 11, 5, 0, 1, 2, 3]).propose(1) == [10]
    assert grown([5, 0, 1, 2, 3, 10, 6, 0, 1, 2, 3, 11, 7, 0, 1, 2, 3]).propose(1) == [11]


@pytest.mark.parametrize("prompt", range(1, 15))
def test_prompt_and_answer_are_one_text(prompt: int) -> None:
    ids = [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 0, 1, 2, 3]
    assert grown(ids, prompt=prompt).propose(8) == [4, 5, 6, 8]


def test_trust_grows_with_what_was_right_and_goes_with_what_was_wrong() -> None:
    quoted = [*range(100, 160), 9]
    drafts = grown([*quoted, *range(100, 104)], most=16)
    first = drafts.propose(99)
    drafts.judge(len(first), len(first))
    assert len(drafts.propose(99)) == 2 * len(first)
    for _ in range(MOST_MATCH):
        drafts.judge(4, 0)
    assert drafts.propose(99) == []  # four tokens are not enough any more
    for token in range(104, 100 + MOST_MATCH):
        drafts.push(token)
    assert drafts.propose(99) == [100 + MOST_MATCH, 101 + MOST_MATCH]  # that many are


def test_text_without_repetition_is_never_drafted() -> None:
    ids = list(range(1000))
    drafts = Drafts(ids[:500], 8)
    for token in ids[500:]:
        drafts.push(token)
        assert drafts.propose(8) == []
    assert LEAST_MATCH >= 2


# --- what comes out ---


@pytest.mark.parametrize("cache", CACHES)
def test_greedy_tokens_are_the_same_with_fewer_steps(cache: str) -> None:
    engine, ids = engine_of().with_prefill(**CACHES[cache]), random_prompt(60)
    plain = engine.generate(ids, max_new_tokens=64, ignore_eos=True, drafts=0)
    # The document says what the model will say, and most of it is evicted.
    prompt = [*ids[:20], *plain.token_ids, *ids[20:]]
    for drafts in (1, 3, 8, 30):
        expected = engine.generate(prompt, max_new_tokens=40, ignore_eos=True, drafts=0)
        found = engine.generate(prompt, max_new_tokens=40, ignore_eos=True, drafts=drafts)
        assert found.token_ids == expected.token_ids
        metrics = found.metrics
        assert metrics.decode_steps + metrics.accepted_tokens >= 39
        assert metrics.accepted_tokens <= metrics.drafted_tokens <= drafts * metrics.decode_steps
        assert expected.metrics.decode_steps == 39
        assert expected.metrics.drafted_tokens == 0


def draft_half_right(monkeypatch: pytest.MonkeyPatch, prompt_length: int, expected: list[int]) -> None:
    """Every draft has two tokens that the model will say, and two that it will hardly."""

    def half_right(drafts: Drafts, most: int) -> list[int]:
        said = len(drafts._ids) - prompt_length
        return [*expected[said : said + 2], 3, 3][:most]

    monkeypatch.setattr(Drafts, "propose", half_right)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3", "gpt_oss", "exaone4", "llama4_text"])
def test_half_right_drafts_change_no_token_in_any_kind_of_family(
    family: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = engine_of(family).with_prefill(**CACHES[cache]), random_prompt(36)
    expected = engine.generate(ids, max_new_tokens=24, ignore_eos=True, drafts=0).token_ids
    draft_half_right(monkeypatch, len(ids), expected)
    found = engine.generate(ids, max_new_tokens=24, ignore_eos=True)
    assert found.token_ids == expected
    assert 0 < found.metrics.accepted_tokens < found.metrics.drafted_tokens


def test_a_quotation_takes_fewer_steps() -> None:
    text = "the quickbrownfx"[4:]
    engine = bigram_engine("\x01" + text)
    prompt = text + "\n\x01"
    generation = engine.generate(prompt, max_new_tokens=len(text))
    assert generation.text == text
    assert generation.metrics.decode_steps < len(text) - 3
    assert generation.metrics.accepted_tokens_per_step > 0
    assert engine.generate(prompt, max_new_tokens=len(text), drafts=0).text == text


def test_max_new_tokens_stop_strings_and_the_end_of_sequence_hold_inside_an_accepted_run() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    engine = bigram_engine("\x01" + text)
    prompt = text + "\n\x01"
    for most in range(1, 20):
        generation = engine.generate(prompt, max_new_tokens=most)
        assert (generation.text, generation.finish_reason) == (text[:most], "length")
        assert generation.metrics.new_tokens == most
    for stop in ("gh", "k", "lmn", "p"):
        for drafts in (0, 8):
            generation = engine.generate(prompt, stop=stop, drafts=drafts)
            assert (generation.text, generation.finish_reason) == (text.split(stop)[0], "stop")
    for ends in (ids_of("h"), ids_of("n")):
        engine.model.generation_config.eos_token_id = ends
        generation = engine.generate(prompt)
        assert generation.token_ids == ids_of(text)[: ids_of(text).index(ends[0])]
        assert generation.finish_reason == "stop"


def test_a_streams_deltas_are_those_without_drafts() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    engine = bigram_engine("\x01" + text)
    prompt = text + "\n\x01"
    assert list(engine.stream(prompt, max_new_tokens=20)) == list(text[:20])


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_gives_the_same_text_with_and_without_drafts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = engine_of(), random_prompt(40)
    options: dict[str, Any] = {"temperature": 1.2, "top_k": 20, "seed": seed, "max_new_tokens": 24}
    expected = engine.generate(ids, ignore_eos=True, drafts=0, **options).token_ids
    draft_half_right(monkeypatch, len(ids), expected)
    found = engine.generate(ids, ignore_eos=True, **options)
    assert found.token_ids == expected
    assert 0 < found.metrics.accepted_tokens < found.metrics.drafted_tokens


@pytest.mark.parametrize("drafts", [-1, 1.5, "8", None, True])
def test_what_is_no_number_of_drafts_is_refused(drafts: Any) -> None:
    with pytest.raises(ConfigError, match="drafts="):
        engine_of().generate([5, 6], drafts=drafts)
