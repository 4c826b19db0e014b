"""Two-pass blockwise scoring and the streaming top-k against float64 and plain sorting."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compress.layers import random_layer
from tests.reference.attention import dense_attention
from tests.reference.selection import snapkv_scores
from tests.tools.live_bytes import LiveBytes
from tidekv_llm.compress.layer_end import select_positions
from tidekv_llm.compress.scoring import OnceEach, StreamingTopK, blocks, pack, unpack_scores, window_lse
from tidekv_llm.compress.selectors import SnapKV

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=True, allow_subnormal=True)


def test_blocks_cover_a_length_without_overlap() -> None:
    assert list(blocks(10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(blocks(0, 4)) == []
    assert list(blocks(3, 100)) == [(0, 3)]


@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blockwise_lse_matches_dense(block_size: int, heads: tuple[int, int], softcap: float | None) -> None:
    layer = random_layer(50, heads=heads[0], kv_heads=heads[1], batch=2, softcap=softcap)
    _, expected = dense_attention(layer.queries, layer.keys, layer.values, 0.4, softcap=softcap)
    found = window_lse(layer, block_size).reshape(expected.shape)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
@pytest.mark.parametrize(("kernel_size", "pooling"), [(5, "max"), (21, "max"), (5, "avg"), (5, "none"), (1, "max")])
def test_blockwise_scores_match_dense(block_size: int, kernel_size: int, pooling: str) -> None:
    layer = random_layer(83, batch=2)
    selector = SnapKV(kernel_size=kernel_size, pooling=pooling)
    prefix = 83 - 16
    scorer = selector.scorer(layer, block_size)
    found = torch.cat([scorer(*block) for block in blocks(prefix, block_size)], dim=-1)
    expected = snapkv_scores(layer.queries, layer.keys, 0.4, kernel_size=kernel_size, pooling=pooling)
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-8)


def test_scores_are_the_same_with_the_attentions_own_lse() -> None:
    layer = random_layer(83, batch=2)
    _, lse = dense_attention(layer.queries, layer.keys, layer.values, 0.4)
    free = SnapKV().scorer(dataclasses.replace(layer, lse=lse.float()), 20)
    two_pass = SnapKV().scorer(layer, 20)
    torch.testing.assert_close(free(10, 40), two_pass(10, 40), rtol=1e-5, atol=1e-8)


def test_live_bytes_while_scoring_do_not_grow_with_the_prompt() -> None:
    peaks = []
    for length in (4096, 32768):
        layer = random_layer(length)
        with LiveBytes() as live:
            kept = select_positions(layer, SnapKV(), 512, window_size=16, sinks=4, block_size=1024)
        assert kept.indices.shape[-1] == 512
        peaks.append(live.peak_bytes)
    assert peaks[0] == peaks[1]


def test_each_key_has_one_score_in_whatever_order_blocks_are_asked() -> None:
    scorer, fresh = SnapKV().scorer(random_layer(83), 20), SnapKV().scorer
    for start, stop in [(40, 60), (4, 24), (24, 44), (30, 34), (44, 67), (0, 67), (0, 1)]:
        torch.testing.assert_close(scorer(start, stop), fresh(random_layer(83), 20)(start, stop), rtol=1e-5, atol=0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=8))
def test_values_are_right_in_any_order_and_computed_once_while_ranges_move_forward(
    steps: list[tuple[int, int]],
) -> None:
    computed: list[int] = []

    def compute(start: int, stop: int) -> torch.Tensor:
        computed.extend(range(start, stop))
        return torch.arange(start, stop).float()

    once = OnceEach(compute)
    for start, length in steps:
        assert once(start, start + length).tolist() == list(range(start, start + length))
    computed.clear()
    forward = OnceEach(compute)
    for start in range(0, 40, 7):
        forward(max(0, start - 3), start + 7 + 3)
    assert computed == list(range(45))


# --- the streaming top-k --------------------------------------------------------------------------------


@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(0, 2**32 - 100))
def test_pack_keeps_every_score_and_position(scores: list[float], start: int) -> None:
    keys = pack(torch.tensor(scores, dtype=torch.float32), start)
    assert (keys & 0xFFFFFFFF).tolist() == list(range(start, start + len(scores)))
    assert unpack_scores(keys).tolist() == scores


@given(st.lists(FLOATS | st.sampled_from([0.0, -0.0, math.inf, -math.inf]), min_size=1, max_size=60))
def test_packed_keys_sort_by_score_then_position(scores: list[float]) -> None:
    keys = pack(torch.tensor(scores, dtype=torch.float32), 0).tolist()
    by_key = sorted(range(len(scores)), key=lambda index: keys[index])
    by_score = sorted(range(len(scores)), key=lambda index: (scores[index], index))
    assert by_key == by_score


@settings(max_examples=60)
@given(
    st.lists(FLOATS | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=60),
    st.integers(1, 70),
    st.integers(1, 70),
)
def test_streaming_top_k_equals_sorting_at_any_block_size(scores: list[float], k: int, block_size: int) -> None:
    best = StreamingTopK(k)
    tensor = torch.tensor([scores, scores[::-1]], dtype=torch.float32)
    for start, stop in blocks(len(scores), block_size):
        best.push(tensor[:, start:stop], 100 + start)
    positions, kept_scores = best.result()
    for row, values in enumerate((scores, scores[::-1])):
        ranked = sorted(range(len(values)), key=lambda index: (values[index], index), reverse=True)
        expected = sorted(ranked[:k])
        assert positions[row].tolist() == [100 + index for index in expected]
        assert kept_scores[row].tolist() == [values[index] for index in expected]


def test_negative_zero_ties_with_zero() -> None:
    assert struct.pack("f", -0.0) != struct.pack("f", 0.0)
    best = StreamingTopK(1)
    best.push(torch.tensor([0.0, -0.0]), 0)
    assert best.result()[0].tolist() == [1]
