"""Layouts: flattened against rectangular and against plain attention, quantised against unquantised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cache.test_rectangular import cache_argument
from tests.reference.attention import dense_attention
from tests.tiny_models import random_prompt, tiny_model
from tests.tools.live_bytes import LiveBytes
from tidekv_llm.attention import AttentionDispatch, AttentionParams, Scratch
from tidekv_llm.cache import head_attention
from tidekv_llm.cache.flattened import FlattenedLayer
from tidekv_llm.cache.rectangular import RectangularLayer
from tidekv_llm.cache.rows import (
    GROUP,
    QuantisedRows,
    expand_per_channel,
    expand_per_token,
    pack_bits,
    quantise_per_channel,
    quantise_per_token,
    unpack_bits,
)
from tidekv_llm.config import PrefillConfig
from tidekv_llm.decode.loop import DecodeAdapter
from tidekv_llm.engine import TideKV
from tidekv_llm.errors import CacheError, ConfigError
from tidekv_llm.hf import tidekv_attention

SCALING = 0.4


def full(length: int = 40, batch: int = 2, kv_heads: int = 2, dim: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    shape = (2, batch, kv_heads, length, dim)
    keys, values = torch.randn(*shape, generator=generator)
    return keys, values


def ragged(lengths: list[int], prompt_length: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randperm(prompt_length, generator=generator)[:n].sort().values for n in lengths]


def append(layer: FlattenedLayer | RectangularLayer, *counts: int, group: int = 2) -> tuple[Tensor, Tensor]:
    """Append tokens step by step; returns the last step's queries and its attention output."""
    generator = torch.Generator().manual_seed(3)
    for count in counts:
        batch, kv_heads = (2, 2)
        new = torch.randn(2, batch, kv_heads, count, 8, generator=generator)
        query = torch.randn(batch, kv_heads * group, count, 8, generator=generator) * 2
        keys, values = layer.update(*new)
        out = layer.attend(query, keys, values, AttentionParams(SCALING))
    return query, out.clone()


def expected_output(layer: FlattenedLayer, query: Tensor, **options: Any) -> Tensor:
    """Dense attention of every row and group on exactly the head's own keys."""
    batch, heads, count, _ = query.shape
    group = heads // layer.kv_heads
    out = torch.zeros(batch, count, heads, 8, dtype=torch.float64)
    for row in range(batch):
        for head in range(layer.kv_heads):
            mine = slice(head * group, (head + 1) * group)
            keys, values = layer.keys_of(head, row)[None, None], layer.values_of(head, row)[None, None]
            chosen = {**options, "sinks": options["sinks"][mine]} if "sinks" in options else options
            out[row, :, mine] = dense_attention(query[row : row + 1, mine], keys, values, SCALING, **chosen)[0][0]
    return out


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (5,), (3, 4)], ids=str)
@pytest.mark.parametrize("tile_bytes", [1, 2**20])
def test_heads_of_different_lengths_attend_to_exactly_their_own_keys(
    counts: tuple[int, ...], tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_attention, "TILE_BYTES", tile_bytes)
    layer = FlattenedLayer(*full(), ragged([3, 21, 8, 40]), reserve=1)
    query, out = append(layer, *counts)
    torch.testing.assert_close(out.double(), expected_output(layer, query), rtol=1e-5, atol=1e-5)


def test_softcap_and_learned_sinks() -> None:
    layer = FlattenedLayer(*full(), ragged([3, 21, 8, 40]), reserve=9)
    query, _ = append(layer, 2, 3)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = layer.attend(query, query, query, AttentionParams(SCALING, softcap=2.0, sinks=sinks))
    expected = expected_output(layer, query, softcap=2.0, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_facts_of_the_layout() -> None:
    layer = FlattenedLayer(*full(), ragged([3, 1, 2, 6]), reserve=4)
    assert layer.head_lens == (3, 1, 2, 6)
    assert layer.cu_klen.tolist() == [0, 3, 4, 6, 12]
    assert layer.cu_klen.dtype == torch.int32
    assert layer.max_klen == 6
    assert layer.nbytes == 12 * 2 * 8 * 4
    append(layer, 1, 1)
    assert layer.nbytes == (12 + 2 * 4) * 2 * 8 * 4
    assert layer.get_seq_length() == 42
    assert layer.get_mask_sizes(1) == (3 + 2 + 1, 42 - 5)
    assert layer.positions_of(1, 0).tolist() == [*ragged([3, 1])[1].tolist(), 40, 41]
    assert layer.keys_of(1, 1).shape == (8, 8)
    layer.reset()
    assert layer.get_seq_length() == 40
    assert layer.nbytes == 12 * 2 * 8 * 4


def test_uniform_heads_give_the_same_cache_in_both_layouts() -> None:
    keys, values = full()
    heads = ragged([9, 9, 9, 9])
    flat = FlattenedLayer(keys, values, heads, reserve=3)
    rectangular = RectangularLayer(keys, values, torch.stack(heads).view(2, 2, 9), reserve=3)
    assert flat.nbytes == rectangular.nbytes
    rectangular.bind(AttentionDispatch("tiled"), Scratch())
    first, second = append(flat, 1, 4)[1], append(rectangular, 1, 4)[1]
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    for row in range(2):
        for head in range(2):
            assert torch.equal(flat.keys_of(head, row), rectangular.keys_of(head, row))
            assert torch.equal(flat.values_of(head, row), rectangular.values_of(head, row))
            assert torch.equal(flat.positions_of(head, row), rectangular.positions_of(head, row))


def test_appending_never_copies_the_prompt() -> None:
    layer = FlattenedLayer(*full(4000, dim=8), ragged([3000, 4000, 2000, 1000], 4000), reserve=64)
    append(layer, 1)
    with LiveBytes() as live:
        append(layer, *[1] * 20)
    assert live.peak_bytes < 4000 * 8 * 4  # one head's keys alone would be more


@pytest.mark.parametrize("flattened", [False, True])
def test_retaining_less_is_as_if_less_had_been_kept(flattened: bool) -> None:
    keys, values = full()
    before, after = ragged([20, 20, 20, 20]), []
    for positions in before:
        after.append(positions[torch.randperm(20)[:7].sort().values])
    layer: Any
    if flattened:
        layer, wanted = FlattenedLayer(keys, values, before, reserve=2), FlattenedLayer(keys, values, after, reserve=2)
    else:
        stacked = [torch.stack(each).view(2, 2, -1) for each in (before, after)]
        layer, wanted = (RectangularLayer(keys, values, each, reserve=2) for each in stacked)
    layer.retain(after)
    assert layer.nbytes == wanted.nbytes
    assert torch.equal(append(layer, 1, 3)[1], append(wanted, 1, 3)[1])
    assert torch.equal(layer.positions_of(1, 1), wanted.positions_of(1, 1))


# --- FlashAttention's kernel, by its documentation ------------------------------------------------------


def _documented_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    softcap: float,
    return_attn_probs: bool,
) -> tuple[Tensor, Tensor, None]:
    """q [total_q, H, D], k and v [total_k, Hkv, D]; returns out [total_q, H, D] and lse [H, total_q]."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert not causal
    assert return_attn_probs
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for first_q, end_q, first_k, end_k in zip(
        cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
    ):
        assert end_q - first_q <= max_seqlen_q
        assert end_k - first_k <= max_seqlen_k
        logits = torch.einsum("qhd,kd->hqk", q[first_q:end_q], k[first_k:end_k, 0]) * softmax_scale
        lse[:, first_q:end_q] = logits.logsumexp(-1)
        out[first_q:end_q] = torch.einsum("hqk,kd->qhd", logits.softmax(-1), v[first_k:end_k, 0])
    return out, lse, None


def _documented_flash(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, softcap: float, return_attn_probs: bool
) -> tuple[Tensor, Tensor, None]:
    assert causal
    parts = (each.transpose(1, 2) for each in (q, k, v))
    out, lse = dense_attention(*parts, softmax_scale)
    return out.to(q.dtype), lse.float(), None


@pytest.mark.parametrize("counts", [(1,), (2, 3)], ids=str)
def test_the_varlen_path_calls_the_kernel_as_documented(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FlattenedLayer(*full(), ragged([3, 21, 8, 40]), reserve=1)
    query, grouped = append(layer, *counts)
    module = SimpleNamespace(flash_attn_varlen_func=_documented_varlen, flash_attn_func=_documented_flash)
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", module)
    tail = (layer.tail_keys[:, :, : sum(counts)], layer.tail_values[:, :, : sum(counts)])
    out = head_attention.varlen_attention(query, layer.rows, tail, AttentionParams(SCALING))  # type: ignore[arg-type]
    torch.testing.assert_close(out, grouped, rtol=1e-5, atol=1e-5)


# --- quantisation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_packing_keeps_every_code(bits: int, columns: int) -> None:
    codes = torch.randint(0, 2**bits, (5, columns), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (5, -(-columns * bits // 8))
    assert torch.equal(unpack_bits(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("shape", [(1, 8), (63, 64), (64, 64), (130, 128), (70, 6), (0, 8)], ids=str)
@pytest.mark.parametrize("per_channel", [True, False])
def test_every_number_moves_by_at_most_half_a_step(bits: int, shape: tuple[int, int], per_channel: bool) -> None:
    matrix = torch.randn(shape) * torch.logspace(-2, 2, shape[1])
    if per_channel:
        back = expand_per_channel(quantise_per_channel(matrix, bits), shape[0], bits, torch.float32)
        groups = list(matrix.split(GROUP, dim=0))
        spans = [group.amax(0, keepdim=True) - group.amin(0, keepdim=True) for group in groups if len(group)]
    else:
        back = expand_per_token(quantise_per_token(matrix, bits), shape[1], bits, torch.float32)
        width = GROUP if shape[1] % GROUP == 0 else shape[1]
        groups = list(matrix.split(width, dim=1))
        spans = [group.amax(1, keepdim=True) - group.amin(1, keepdim=True) for group in groups if len(group)]
    assert back.shape == matrix.shape
    if shape[0] == 0:
        return
    limit = torch.cat(
        [span.expand_as(group) for span, group in zip(spans, groups, strict=True)], dim=0 if per_channel else 1
    )
    # float16 scales and zeros add a little to the half step.
    assert ((back - matrix).abs() <= limit / (2**bits - 1) * 0.51 + limit * 2e-3 + matrix.abs() * 2e-3).all()


def test_a_constant_is_stored_exactly() -> None:
    matrix = torch.full((70, 8), 0.5)
    assert torch.equal(expand_per_channel(quantise_per_channel(matrix, 2), 70, 2, torch.float32), matrix)
    assert torch.equal(expand_per_token(quantise_per_token(matrix, 2), 8, 2, torch.float32), matrix)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.56), (4, 0.31), (2, 0.19)])
def test_bytes_really_shrink_and_the_residual_is_untouched(bits: int, share: float) -> None:
    keys, values = (each.bfloat16() for each in full(2048, batch=1, dim=64))
    layer = FlattenedLayer(keys, values, ragged([1000, 1048], 2048), reserve=5)
    plain, old_keys = layer.nbytes, [layer.keys_of(head) for head in range(2)]
    layer.quantise(bits, residual=32)
    assert layer.nbytes <= share * plain
    for head in range(2):
        assert torch.equal(layer.keys_of(head)[-32:], old_keys[head][-32:])
        error = (layer.keys_of(head) - old_keys[head]).float().norm() / old_keys[head].float().norm()
        assert 0 < error < {8: 0.02, 4: 0.15, 2: 0.6}[bits]
    assert layer.head_lens == (1000, 1048)
    assert len(layer.positions_of(0)) == 1000


def test_new_tokens_leave_what_was_quantised_alone() -> None:
    layer = FlattenedLayer(*full(), ragged([12, 21, 18, 40]), reserve=0)
    layer.quantise(4, residual=8)
    rows = layer.rows
    assert isinstance(rows, QuantisedRows)
    codes = rows._keys.codes.clone()
    query, out = append(layer, 1, 1, 5)
    assert layer.rows is rows
    assert torch.equal(rows._keys.codes, codes)
    torch.testing.assert_close(out.double(), expected_output(layer, query), rtol=1e-5, atol=1e-5)


# --- through the engine and through generate() ----------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "rectangular": {},
    "flattened": {"layout": "flattened"},
    "ada": {"head_budget": "ada"},
    "pyramid + ada": {"layer_budget": "pyramid", "head_budget": "ada", "beta": 3},
    "cake": {"layer_budget": "cake"},
    "cake + ada": {"layer_budget": "cake", "head_budget": "ada"},
    "8 bits": {"kv_bits": 8, "kv_residual": 4},
    "cake + 2 bits": {"layer_budget": "cake", "kv_bits": 2, "kv_residual": 4},
}


def engine(family: str = "llama", **options: Any) -> TideKV:
    base = {"kept_tokens": 24, "window_size": 8, "sinks": 2, "kernel_size": 3, "chunk_size": 20}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = tiny_model(family, **({"layer_types": kinds} if family == "gemma3_text" else {}))
    return TideKV(model, prefill=PrefillConfig(**{**base, **options}))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_generate_continues_from_any_cache_as_our_own_loop_does(setting: str, family: str) -> None:
    llm = engine(family, **SETTINGS[setting])
    prompt = random_prompt(90)
    cache = llm.prefill(prompt[:-1]).cache
    step = DecodeAdapter(llm._open().decoder, cache, AttentionDispatch()).step
    expected, token = [], prompt[-1]
    for _ in range(6):
        token = int(step(torch.tensor([[token]])).argmax())
        expected.append(token)
    for layer in cache.layers:
        layer.reset()
    ids = torch.tensor([prompt])
    with tidekv_attention(llm.model):
        output = llm.model.generate(
            ids,
            **{cache_argument(llm.model): cache},
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
        )
    assert output[0, 90:].tolist() == expected
    assert llm.model.config._attn_implementation != "tidekv_cache"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_without_our_attention_is_refused_for_a_flattened_cache(attention: str) -> None:
    llm = engine(head_budget="ada")
    llm.model.set_attn_implementation(attention)
    prompt = random_prompt(90)
    cache = llm.prefill(prompt[:-1]).cache
    ids = torch.tensor([prompt])
    with pytest.raises(CacheError, match=r"call generate\(\) inside `with tidekv_attention\(model\):`"):
        llm.model.generate(
            ids, **{cache_argument(llm.model): cache}, max_new_tokens=2, attention_mask=torch.ones_like(ids)
        )


@pytest.mark.parametrize("setting", SETTINGS)
def test_totals_are_exact_whatever_is_combined(setting: str) -> None:
    llm = engine(**SETTINGS[setting])
    cache = llm.prefill(random_prompt(90)).cache
    kept = [[len(cache.positions(layer, head)) for head in range(2)] for layer in range(3)]
    assert sum(map(sum, kept)) == 3 * 2 * 24
    for layer in range(3):
        for head in range(2):
            positions = set(cache.positions(layer, head).tolist())
            assert {0, 1, *range(82, 90)} <= positions
            assert len(positions) == kept[layer][head]
    if "cake" in setting or "pyramid" in setting:
        assert len({sum(heads) for heads in kept}) > 1


def test_only_full_attention_layers_share_the_budget() -> None:
    llm = engine("gemma3_text", layer_budget="pyramid")
    decoder = llm._open().decoder
    full_layers = [i for i in range(decoder.num_layers) if decoder.sliding_window(i) is None]
    assert full_layers == [1, 2]
    cache = llm.prefill(random_prompt(90)).cache
    assert sum(len(cache.positions(i, 0)) for i in full_layers) == 24 * len(full_layers)
    assert all(len(cache.positions(i, 0)) == 8 for i in range(decoder.num_layers) if i not in full_layers)


def test_head_adaptive_budgets_store_a_quarter_of_the_bytes_at_a_quarter_of_the_prompt() -> None:
    everything = engine(kept_tokens=4096).prefill(random_prompt(400)).cache.nbytes
    for options in ({"head_budget": "ada"}, {"head_budget": "ada", "layer_budget": "pyramid"}):
        cache = engine(kept_tokens=100, **options).prefill(random_prompt(400)).cache
        assert cache.nbytes <= 0.255 * everything
        lengths = {len(cache.positions(layer, head)) for layer in range(3) for head in range(2)}
        assert len(lengths) > 1  # it did adapt


@pytest.mark.parametrize("selector", ["snapkv", "chunkkv", "keydiff", "h2o", "expected-attention", "random"])
@pytest.mark.parametrize("options", [{}, {"layer_budget": "cake", "head_budget": "ada"}], ids=str)
def test_any_selector_composes_and_no_prompt_leaves_a_trace(selector: str, options: dict[str, Any]) -> None:
    first, second = random_prompt(130, seed=1), random_prompt(90, seed=2)

    def kept(*prompts: list[int]) -> list[list[int]]:
        llm = engine(selector=selector, **options)
        for prompt in prompts:
            cache = llm.prefill(prompt).cache
        return [cache.positions(layer, head).tolist() for layer in range(3) for head in range(2)]

    assert kept(first, second) == kept(second)
    assert kept(second, first) == kept(first)


@pytest.mark.parametrize("selector", ["h2o", "expected-attention"])
def test_selectors_that_see_all_queries_do_not_depend_on_the_chunk_size(selector: str) -> None:
    def kept(chunk_size: int) -> list[list[int]]:
        cache = engine(selector=selector, chunk_size=chunk_size).prefill(random_prompt(90)).cache
        return [cache.positions(layer, head).tolist() for layer in range(3) for head in range(2)]

    assert kept(90) == kept(7) == kept(1)


def test_reused_layers_keep_the_same_positions() -> None:
    from tidekv_llm.compress.selectors import ChunkKV

    cache = engine(selector=ChunkKV(chunk_length=4, reuse_layers=2)).prefill(random_prompt(90)).cache
    kept = [[cache.positions(layer, head).tolist() for head in range(2)] for layer in range(3)]
    assert kept[0] == kept[1]
    assert kept[2] != kept[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_bits": 3}, "kv_bits=3 is unknown; choose one of 16, 8, 4, 2"),
        ({"floor_alpha": 1.5}, "floor_alpha=1.5 must be a number from 0 to 1"),
        ({"floor_alpha": "x"}, "floor_alpha='x' must be"),
        ({"beta": 0}, "beta=0 must be a whole number of at least 1"),
        ({"kv_residual": -1}, "kv_residual=-1"),
        ({"weights": "late"}, "weights='late' is unknown"),
        ({"layout": "rectangular", "head_budget": "ada"}, "layout='rectangular' has one length"),
        ({"layout": "cubic"}, "layout='cubic' is unknown"),
        ({"layer_budget": "cone"}, "layer_budget='cone' is unknown; choose one of uniform, pyramid, cake"),
        ({"head_budget": "cone"}, "choose one of uniform, ada"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        PrefillConfig(**options)
