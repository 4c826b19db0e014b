"""Algorithm 1: what it computes does not depend on how the prompt is cut, and what it holds is bounded."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.reference.selection import kept_positions, snapkv_scores
from tests.tiny_models import random_prompt, tiny_model
from tests.tools.live_bytes import LiveBytes
from tidekv_llm import PrefillConfig, Prefilled, TideKV

S = 75
SMALL = PrefillConfig(chunk_size=16, kept_tokens=20, window_size=6, sinks=2, kernel_size=5, score_block_size=16)


@functools.cache
def engine_of(family: str) -> TideKV:
    return TideKV(tiny_model(family), prefill=SMALL)


def kept_sets(prefilled: Prefilled) -> list[list[int]]:
    layers = range(len(prefilled.cache.layers))
    return [prefilled.cache.positions(layer, head).tolist() for layer in layers for head in range(2)]


def assert_same(found: Prefilled, expected: Prefilled) -> None:
    assert kept_sets(found) == kept_sets(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    for layer in range(3):
        torch.testing.assert_close(found.cache.keys(layer, 1), expected.cache.keys(layer, 1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.cache.values(layer, 1), expected.cache.values(layer, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("chunk_size", [1, 7, S - 3, S, S + 1, 2048, "auto"])
def test_kept_sets_and_logits_do_not_depend_on_the_chunk_size(chunk_size: int | str, family: str) -> None:
    engine = engine_of(family)
    found = engine.with_prefill(chunk_size=chunk_size).prefill(random_prompt(S))
    assert_same(found, engine.prefill(random_prompt(S)))


@pytest.mark.parametrize("pooling", ["max", "avg", "none"])
@pytest.mark.parametrize("block_size", [1, 5, 64, 1000])
def test_kept_sets_do_not_depend_on_the_score_block_size(block_size: int, pooling: str) -> None:
    engine = engine_of("llama").with_prefill(pooling=pooling)
    found = engine.with_prefill(score_block_size=block_size).prefill(random_prompt(S))
    assert_same(found, engine.prefill(random_prompt(S)))


@pytest.mark.parametrize("document_end", [1, 15, 16, 40, S - 6, S - 1, S])
def test_a_cut_at_the_documents_end_changes_nothing(document_end: int) -> None:
    engine = engine_of("llama")
    assert_same(engine.prefill(random_prompt(S), document_end=document_end), engine.prefill(random_prompt(S)))


@pytest.mark.parametrize("attention", ["tiled", "merge"])
def test_kept_sets_do_not_depend_on_the_attention_backend(attention: str) -> None:
    engine = engine_of("llama")
    assert_same(engine.with_prefill(attention=attention).prefill(random_prompt(S)), engine.prefill(random_prompt(S)))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_post_prefill_control_gives_the_same_cache(family: str) -> None:
    engine = engine_of(family)
    assert_same(
        engine.with_prefill(schedule="post-prefill").prefill(random_prompt(S)), engine.prefill(random_prompt(S))
    )


def test_all_outputs_give_the_same_cache() -> None:
    engine = engine_of("llama")
    assert_same(engine.prefill(random_prompt(S), all_outputs=True), engine.prefill(random_prompt(S)))


def test_kept_rows_are_the_full_caches_rows_at_their_positions() -> None:
    engine = engine_of("llama")
    full = engine.with_prefill(kept_tokens=4096).prefill(random_prompt(S)).cache
    evicted = engine.prefill(random_prompt(S)).cache
    for layer in range(3):
        for head in range(2):
            positions = evicted.positions(layer, head)
            assert torch.equal(evicted.keys(layer, head), full.keys(layer, head)[positions])
            assert torch.equal(evicted.values(layer, head), full.values(layer, head)[positions])


def layer_queries(engine: TideKV, ids: list[int]) -> list[Tensor]:
    """Rotated queries [1, Hq, S, D] of every layer from the model's own forward."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, inputs = engine.model, []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append((module, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        queries = []
        for module, kwargs in inputs:
            hidden = kwargs["hidden_states"]
            plain = module.q_proj(hidden).view(1, len(ids), 4, 8).transpose(1, 2)
            queries.append(apply_rotary_pos_emb(plain, plain, *kwargs["position_embeddings"])[0])
    return queries


def test_the_engine_keeps_what_the_dense_equations_keep() -> None:
    """Eqs. 4-8 on the model's own queries, computed outside of the engine."""
    ids = random_prompt(S)
    engine = engine_of("llama")
    full = engine.with_prefill(kept_tokens=4096).prefill(ids).cache
    evicted = engine.prefill(ids).cache
    for layer, queries in enumerate(layer_queries(engine, ids)):
        keys = torch.stack([full.keys(layer, head) for head in range(2)])[None]
        scores = snapkv_scores(queries[:, :, -6:], keys, 8**-0.5, kernel_size=5, pooling="max")[0]
        for head in range(2):
            expected = kept_positions(scores[head], S, 20, 6, 2)
            assert evicted.positions(layer, head).tolist() == expected


def test_evidence_is_the_mass_behind_what_was_kept() -> None:
    prefilled = engine_of("llama").prefill(random_prompt(S))
    assert prefilled.evidence is not None
    assert prefilled.evidence.shape == (S,)
    kept = {position for positions in kept_sets(prefilled) for position in positions if 2 <= position < S - 6}
    assert set(prefilled.evidence.nonzero().flatten().tolist()) == kept
    assert engine_of("llama").with_prefill(selector="recent").prefill(random_prompt(S)).evidence is None


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 8, 9, 19, 20, 21])
def test_short_prompts_work_and_keep_what_fits(length: int) -> None:
    prefilled = engine_of("llama").prefill(random_prompt(length))
    assert prefilled.next_position == length
    assert {len(positions) for positions in kept_sets(prefilled)} == {min(20, length)}
    with torch.no_grad():
        expected = engine_of("llama").model(torch.tensor([random_prompt(length)])).logits[0, -1]
    torch.testing.assert_close(prefilled.logits, expected, rtol=1e-4, atol=1e-4)


# --- memory ---------------------------------------------------------------------------------------------


def peak_bytes(layers: int, length: int = 600, **changes: object) -> tuple[int, Prefilled]:
    engine = TideKV(
        tiny_model(num_hidden_layers=layers),
        prefill=PrefillConfig(chunk_size=64, kept_tokens=40, score_block_size=64).replace(**changes),
    )
    with LiveBytes() as live:
        prefilled = engine.prefill(random_prompt(length))
    return live.peak_bytes, prefilled


def stored_bytes(prefilled: Prefilled) -> int:
    layers = prefilled.cache.layers
    return sum(layer.kept_positions.nbytes + layer.keys.nbytes + layer.values.nbytes for layer in layers)


def test_full_keys_and_values_are_resident_for_one_layer_only() -> None:
    three, small = peak_bytes(3)
    six, large = peak_bytes(6)
    stored = stored_bytes(large) - stored_bytes(small)
    assert stored < 2 * 600 * 2 * 8 * 4  # less than one layer's full K/V, or this would prove nothing
    assert six <= three + stored


def test_the_peak_grows_with_the_prompt_by_active_kv_bridge_and_evidence_alone() -> None:
    short, _ = peak_bytes(3, 600)
    long, _ = peak_bytes(3, 1800)
    per_token = 2 * 2 * 8 * 4 + 32 * 4  # K and V of one layer, one hidden state
    ids_and_evidence = 8 + 4
    # one tile's rows, [group of 2, chunk, S], while that is below the tile size
    scores = 64 * 2 * 4
    assert long - short <= 1200 * (per_token + ids_and_evidence + scores)


def test_tile_scores_are_bounded_by_the_tile_size() -> None:
    from tidekv_llm.attention import TILE_BYTES

    long, _ = peak_bytes(2, 3000, chunk_size=1024)
    assert long < TILE_BYTES + 3000 * (2 * 2 * 8 * 4 + 32 * 4 + 12) + 1024 * 4 * (6 * 48 + 12 * 32)


def test_nothing_stays_alive_but_the_result() -> None:
    engine = TideKV(tiny_model(), prefill=SMALL)
    with LiveBytes() as live:
        prefilled = engine.prefill(random_prompt(400))
        assert prefilled.evidence is not None
        kept = stored_bytes(prefilled) + prefilled.logits.nbytes + prefilled.evidence.nbytes + prefilled.hidden.nbytes
        assert live.live_bytes <= kept
        del prefilled
        assert live.live_bytes == 0


def test_an_error_in_the_middle_leaves_nothing_alive() -> None:
    engine = TideKV(tiny_model(), prefill=SMALL)

    def fail(progress: object) -> None:
        raise ZeroDivisionError

    with LiveBytes() as live:
        with pytest.raises(ZeroDivisionError):
            engine.prefill(random_prompt(400), progress=fail)
        assert live.live_bytes == 0


def test_components_are_the_bytes_of_the_equation() -> None:
    prefilled = TideKV(tiny_model(), prefill=SMALL).prefill(random_prompt(400))
    components = prefilled.metrics.components
    assert components["active_kv"] == 2 * 2 * 400 * 8 * 4
    assert components["bridge"] == 400 * 32 * 4
    assert components["compressed_cache"] == prefilled.cache.nbytes == 3 * 2 * 2 * 20 * 8 * 4
    assert components["weights"] >= sum(p.nbytes for p in tiny_model().parameters())
