"""Every attention backend against dense float64 attention."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.attention import dense_attention
from tests.tools.live_bytes import LiveBytes
from tidekv_llm.attention import (
    AttentionDispatch,
    AttentionParams,
    FlashAttention,
    MergeAttention,
    Scratch,
    TiledAttention,
    mask_future_,
)
from tidekv_llm.errors import ConfigError

# (query heads, KV heads): grouped, multi-head, multi-query
HEADS = [(6, 2), (3, 3), (4, 1)]
# (keys, queries): no history, a history, a history longer than the chunk, one query
LENGTHS = [(13, 13), (40, 11), (70, 16), (33, 1), (1, 1)]


def flash_stand_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """What flash-attn documents for ``flash_attn_func``, on a CPU.

    Tensors are [batch, length, heads, head_dim]. Masks and windows are aligned to the bottom right: query
    i sees keys i + L - C - left .. i + L - C + right.
    """
    assert dropout_p == 0.0
    assert alibi_slopes is None
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "flash-attn takes one head size"
    assert q.shape[2] % k.shape[2] == 0
    count, length, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keys = k.repeat_interleave(group, dim=2).double().permute(0, 2, 3, 1)
    logits = q.double().transpose(1, 2) @ keys * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    left, right = window_size
    if causal:
        right = 0
    here = torch.arange(count)[:, None] + length - count
    there = torch.arange(length)[None, :]
    if left >= 0:
        logits = logits.masked_fill(there < here - left, -math.inf)
    if right >= 0:
        logits = logits.masked_fill(there > here + right, -math.inf)
    values = v.repeat_interleave(group, dim=2).double().transpose(1, 2)
    out = (logits.softmax(dim=-1) @ values).transpose(1, 2).to(q.dtype)
    return (out, logits.logsumexp(dim=-1).float(), None) if return_attn_probs else out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    module = types.ModuleType("flash_attn")
    module.__spec__ = types.SimpleNamespace(name="flash_attn")  # type: ignore[assignment]
    module.flash_attn_func = flash_stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return FlashAttention()


def tensors(
    heads: int,
    kv_heads: int,
    length: int,
    count: int,
    *,
    batch: int = 2,
    dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(heads * 1000 + length * 10 + count)
    query = torch.randn(batch, heads, count, dim, generator=generator) * 2
    key = torch.randn(batch, kv_heads, length, dim, generator=generator)
    value = torch.randn(batch, kv_heads, length, value_dim, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def assert_matches_dense(
    backend: Any,
    given: tuple[Tensor, Tensor, Tensor],
    params: AttentionParams,
    lse_rows: int,
    tolerance: float,
) -> None:
    expected, expected_lse = dense_attention(
        *given, params.scaling, window=params.window, softcap=params.softcap, sinks=params.sinks
    )
    out, lse = backend(*given, params, Scratch(), lse_rows)
    assert out.dtype == given[0].dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    if lse_rows:
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse.double(), expected_lse[:, :, -lse_rows:], rtol=tolerance, atol=tolerance)
    else:
        assert lse is None


BACKENDS = {
    "tiled": TiledAttention(),
    "tiny-tiles": TiledAttention(tile_bytes=512),
    "one-query-tiles": TiledAttention(tile_bytes=1),
    "merge": MergeAttention(),
}


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_output_and_lse_match_dense_attention(name: str, lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    length, count = lengths
    params = AttentionParams(scaling=0.3)
    for lse_rows in {0, min(3, count), count}:
        assert_matches_dense(BACKENDS[name], tensors(*heads, length, count), params, lse_rows, 1e-5)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [1, 2, 5, 11, 16, 69, 200])
@pytest.mark.parametrize("name", ["tiled", "tiny-tiles", "one-query-tiles"])
def test_sliding_window_matches_dense_attention(name: str, window: int, lengths: tuple[int, int]) -> None:
    length, count = lengths
    params = AttentionParams(scaling=0.3, window=window)
    assert_matches_dense(BACKENDS[name], tensors(4, 2, length, count, batch=1), params, min(3, count), 1e-5)


@pytest.mark.parametrize("name", ["tiled", "tiny-tiles"])
@pytest.mark.parametrize("window", [None, 6])
def test_softcap_matches_dense_attention(name: str, window: int | None) -> None:
    params = AttentionParams(scaling=0.5, softcap=2.0, window=window)
    assert_matches_dense(BACKENDS[name], tensors(6, 2, 40, 11), params, 11, 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lse_rows", [0, 3])
def test_attention_sinks_match_dense_attention(name: str, lse_rows: int) -> None:
    params = AttentionParams(scaling=0.5, sinks=torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, 8.0]))
    assert_matches_dense(BACKENDS[name], tensors(6, 2, 40, 11), params, lse_rows, 1e-5)


@pytest.mark.parametrize("name", ["tiled", "tiny-tiles"])
def test_value_size_may_differ_from_key_size(name: str) -> None:
    given = tensors(6, 2, 40, 11, dim=8, value_dim=5)
    assert_matches_dense(BACKENDS[name], given, AttentionParams(scaling=0.5), 4, 1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16_stays_at_its_rounding(name: str) -> None:
    given = tensors(6, 2, 70, 16, dtype=torch.bfloat16)
    assert_matches_dense(BACKENDS[name], given, AttentionParams(scaling=0.3), 4, 0.05)


@pytest.mark.parametrize("name", BACKENDS)
def test_large_logits_do_not_overflow(name: str) -> None:
    query, key, value = tensors(6, 2, 40, 11)
    out, lse = BACKENDS[name](query * 1000, key, value, AttentionParams(scaling=1.0), Scratch(), 11)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(scaling=0.3),
        AttentionParams(scaling=0.3, window=1),
        AttentionParams(scaling=0.3, window=7),
        AttentionParams(scaling=0.3, softcap=2.0),
    ],
    ids=["plain", "window-1", "window-7", "softcap"],
)
def test_flash_call_matches_dense_attention(
    flash: FlashAttention, params: AttentionParams, heads: tuple[int, int], lengths: tuple[int, int]
) -> None:
    length, count = lengths
    for lse_rows in {0, min(3, count)}:
        assert_matches_dense(flash, tensors(*heads, length, count), params, lse_rows, 1e-5)


@pytest.mark.parametrize("lse_rows", [0, 3])
def test_flash_call_adds_attention_sinks(flash: FlashAttention, lse_rows: int) -> None:
    params = AttentionParams(scaling=0.3, window=9, sinks=torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, 8.0]))
    assert_matches_dense(flash, tensors(6, 2, 40, 11), params, lse_rows, 1e-5)


def test_flash_is_for_half_precision_on_cuda_only(flash: FlashAttention) -> None:
    query, key, value = tensors(6, 2, 40, 11, dtype=torch.bfloat16)
    assert not flash.supports(query, AttentionParams(scaling=1.0))
    with pytest.raises(ConfigError, match="attention='flash' cannot run on cpu"):
        AttentionDispatch("flash").attend(query, key, value, AttentionParams(scaling=1.0), Scratch())


@pytest.mark.parametrize("name", ["auto", "tiled", "merge"])
def test_dispatch_gives_the_forced_backend_exactly(name: str) -> None:
    given, params = tensors(6, 2, 40, 11), AttentionParams(scaling=0.3)

    def attend(*arguments: Any) -> Any:
        return AttentionDispatch(name).attend(*arguments[:-1], lse_rows=arguments[-1])

    assert_matches_dense(attend, given, params, 5, 1e-5)


@pytest.mark.parametrize("params", [AttentionParams(scaling=1.0, window=3), AttentionParams(scaling=1.0, softcap=2.0)])
def test_a_forced_backend_that_would_be_wrong_is_refused(params: AttentionParams) -> None:
    for name in ("merge", "sdpa"):
        with pytest.raises(ConfigError, match=f"attention='{name}' cannot run .* use attention='auto'"):
            AttentionDispatch(name).attend(*tensors(6, 2, 40, 11), params, Scratch())


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'fast' is unknown; choose one of auto, flash, sdpa, tiled, merge"):
        AttentionDispatch("fast")


def test_scratch_reused_over_calls_of_all_sizes_does_not_change_results() -> None:
    scratch = Scratch()
    backend = TiledAttention(tile_bytes=2048)
    for length, count, window in [
        (16, 16, None),
        (70, 16, 7),
        (33, 1, None),
        (90, 20, None),
        (40, 11, 3),
        (16, 16, None),
    ]:
        given, params = tensors(6, 2, length, count), AttentionParams(scaling=0.3, window=window)
        out, lse = backend(*given, params, scratch, count)
        fresh, fresh_lse = backend(*given, params, Scratch(), count)
        assert torch.equal(out, fresh)
        assert torch.equal(lse, fresh_lse)


def test_a_kept_lse_survives_the_next_call() -> None:
    scratch, backend, params = Scratch(), TiledAttention(), AttentionParams(scaling=0.3)
    _, lse = backend(*tensors(6, 2, 40, 11), params, scratch, 4)
    before = lse.clone()
    backend(*tensors(6, 2, 70, 16), params, scratch, 4)
    assert torch.equal(lse, before)


def test_scratch_grows_by_replacing_and_keeps_what_is_large_enough() -> None:
    scratch, like = Scratch(), torch.zeros(1)
    first = scratch.take("a", (4, 5), like)
    assert scratch.take("a", (3, 2), like).data_ptr() == first.data_ptr()
    assert scratch.nbytes == 80
    scratch.take("a", (100,), like)
    assert scratch.nbytes == 400
    assert scratch.take("b", (2,), like, capacity=10).shape == (2,)
    assert scratch.nbytes == 440


@pytest.mark.parametrize("window", [None, 64])
def test_tiled_temporaries_do_not_grow_with_the_history(window: int | None) -> None:
    tile_bytes, peaks = 64 * 1024, []
    for length in (1024, 8192):
        given = tensors(4, 2, length, 32, batch=1)
        with LiveBytes() as live:
            TiledAttention(tile_bytes)(*given, AttentionParams(scaling=0.3, window=window), Scratch(), 16)
        peaks.append(live.peak_bytes)
    # one [C, S] float32 matrix of 8,192 keys would be 1 MiB
    assert peaks[1] <= peaks[0] + 16 * 1024
    assert peaks[1] < 4 * tile_bytes


@pytest.mark.parametrize(("tiles", "first"), [(False, "merge"), (True, "tiled")])
def test_auto_takes_tiles_where_they_are_faster_and_else_the_fused_kernel(tiles: bool, first: str) -> None:
    query, key, value = tensors(4, 2, 40, 11)
    params = AttentionParams(scaling=0.3)
    found, lse = AttentionDispatch(tiles=tiles).attend(query, key, value, params, Scratch(), lse_rows=5)
    expected, expected_lse = AttentionDispatch(first).attend(query, key, value, params, Scratch(), lse_rows=5)
    assert torch.equal(found, expected)
    assert torch.equal(lse, expected_lse)


def test_auto_computes_on_tiles_what_the_fused_kernel_cannot() -> None:
    query, key, value = tensors(4, 2, 40, 11)
    for params in (AttentionParams(scaling=0.3, window=9), AttentionParams(scaling=0.3, softcap=4.0)):
        found, _ = AttentionDispatch().attend(query, key, value, params, Scratch())
        expected, _ = AttentionDispatch("tiled").attend(query, key, value, params, Scratch())
        assert torch.equal(found, expected)


@pytest.mark.parametrize("own", [-7, -3, -1, 0, 2, 4, 5, 9])
def test_a_query_sees_no_key_after_its_own_wherever_the_keys_begin(own: int) -> None:
    """Row r stands at key own + r of these 6 keys; before the first one it sees none, past the last one all."""
    logits = torch.zeros(2, 3, 6)
    mask_future_(logits, own)
    expected = [[0.0 if key <= own + row else -math.inf for key in range(6)] for row in range(3)]
    assert torch.equal(logits, torch.tensor([expected, expected]))
