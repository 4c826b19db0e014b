"""LayerEndCompress: which positions stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.compress.layers import random_layer
from tests.reference.selection import kept_positions, snapkv_scores
from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.layer_end import mandatory_ranges, select_positions
from tidekv_llm.compress.selectors import Recent, Selector, SnapKV
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import BudgetError, SelectorError


@dataclass(frozen=True)
class Given(Selector):
    """Scores that the test computes; not registered."""

    name: ClassVar[str] = "given"
    function: Callable[[FullLayer, int, int], Tensor]

    def scorer(self, layer: FullLayer, block_size: int) -> Callable[[int, int], Tensor]:
        return lambda start, stop: self.function(layer, start, stop)


def constant(layer: FullLayer, start: int, stop: int) -> Tensor:
    return torch.ones(layer.keys.shape[0], layer.kv_heads, stop - start)


@pytest.mark.parametrize(
    ("heads", "batch", "kernel_size", "pooling"),
    [
        ((4, 2), 3, 7, "max"),
        ((3, 3), 1, 21, "max"),
        ((4, 1), 3, 5, "max"),
        ((4, 2), 1, 7, "avg"),
        ((4, 2), 3, 1, "none"),
    ],
    ids=str,
)
def test_kept_sets_equal_the_dense_selection_at_any_block_size(
    heads: tuple[int, int], batch: int, kernel_size: int, pooling: str
) -> None:
    layer = random_layer(101, heads=heads[0], kv_heads=heads[1], batch=batch)
    scores = snapkv_scores(layer.queries, layer.keys, 0.4, kernel_size=kernel_size, pooling=pooling)
    selector = SnapKV(kernel_size=kernel_size, pooling=pooling)
    for block_size in (1, 9, 30, 4096):
        kept = select_positions(layer, selector, 40, window_size=16, sinks=4, block_size=block_size)
        for row in range(batch):
            for head in range(heads[1]):
                expected = kept_positions(scores[row][head], 101, 40, 16, 4)
                assert kept.indices[row, head].tolist() == expected


@pytest.mark.parametrize("budget", [20, 21, 50, 99, 100])
@pytest.mark.parametrize("sinks", [0, 4])
def test_exactly_k_ascending_positions_with_the_mandatory_ones(budget: int, sinks: int) -> None:
    layer = random_layer(100, batch=2)
    kept = select_positions(layer, SnapKV(), budget, window_size=16, sinks=sinks, block_size=9).indices
    assert kept.shape == (2, 2, budget)
    assert kept.dtype == torch.int64
    assert (kept.diff(dim=-1) > 0).all()
    for head in kept.flatten(0, 1).tolist():
        assert set(range(sinks)) <= set(head)
        assert set(range(84, 100)) <= set(head)


def test_scored_positions_come_with_their_scores() -> None:
    layer = random_layer(100)
    kept = select_positions(layer, SnapKV(kernel_size=7), 40, window_size=16, sinks=4, block_size=9)
    scores = torch.tensor(snapkv_scores(layer.queries, layer.keys, 0.4, kernel_size=7, pooling="max"))
    assert kept.indices[..., 4:-16].equal(kept.scored)
    torch.testing.assert_close(kept.scores, scores.gather(-1, kept.scored).float(), rtol=1e-5, atol=1e-8)


def test_ties_go_to_the_later_position() -> None:
    for block_size in (1, 7, 1000):
        kept = select_positions(random_layer(50), Given(constant), 25, window_size=16, sinks=4, block_size=block_size)
        assert kept.indices[0, 0].tolist() == [*range(4), *range(29, 50)]


@pytest.mark.parametrize("length", [1, 3, 15, 16, 17, 19, 20, 21, 40])
def test_short_prompts_keep_the_smaller_of_budget_and_length(length: int) -> None:
    for budget in (20, 40):
        layer = random_layer(length)
        kept = select_positions(layer, SnapKV(), budget, window_size=16, sinks=4, block_size=8).indices
        assert kept.shape[-1] == min(budget, length)
        assert (kept.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("budget", [60, 61, 10_000])
def test_a_budget_of_the_whole_prompt_keeps_all_bit_for_bit(budget: int) -> None:
    layer = random_layer(60, batch=2)
    config = PrefillConfig(kept_tokens=budget)
    stored = Compressor(config, 3, 60).compress(layer, None)
    assert torch.equal(stored.keys, layer.keys)
    assert torch.equal(stored.values, layer.values)
    assert stored.positions()[1, 1].tolist() == list(range(60))


def test_gathered_rows_are_the_rows_at_the_kept_positions() -> None:
    layer = random_layer(60, batch=2, window=8)
    stored = Compressor(PrefillConfig(kept_tokens=30, window_size=8), 3, 60, reserve=5).compress(layer, None)
    for row in range(2):
        for head in range(2):
            positions = stored.positions()[row, head]
            assert torch.equal(stored.keys[row, head, :30], layer.keys[row, head, positions])
            assert torch.equal(stored.values[row, head, :30], layer.values[row, head, positions])
    assert stored.keys.untyped_storage().data_ptr() != layer.keys.untyped_storage().data_ptr()


@pytest.mark.parametrize("length", [5, 30, 100])
def test_recent_keeps_sinks_and_the_latest(length: int) -> None:
    kept = select_positions(random_layer(length), Recent(), 30, window_size=16, sinks=4, block_size=7).indices
    expected = range(length) if length <= 30 else [*range(4), *range(length - 26, length)]
    assert kept[0, 0].tolist() == kept[0, 1].tolist() == list(expected)


@pytest.mark.parametrize("window", [1, 8, 60, 200])
def test_a_sliding_layer_keeps_exactly_its_window(window: int) -> None:
    layer = random_layer(60)
    stored = Compressor(PrefillConfig(kept_tokens=20), 3, 60).compress(layer, window)
    first = max(0, 60 - window)
    assert stored.positions()[0, 0].tolist() == list(range(first, 60))
    assert torch.equal(stored.keys, layer.keys[:, :, first:])


def test_mandatory_ranges_never_overlap() -> None:
    assert mandatory_ranges(100, 16, 4) == (4, 84)
    assert mandatory_ranges(18, 16, 4) == (2, 2)
    assert mandatory_ranges(3, 16, 4) == (0, 0)
    assert mandatory_ranges(100, 16, 0) == (0, 84)


def test_a_budget_below_the_mandatory_set_names_the_feasible_one() -> None:
    with pytest.raises(BudgetError, match="kept_tokens=19 is below the 20 mandatory positions of layer 1"):
        select_positions(random_layer(50), SnapKV(), 19, window_size=16, sinks=4, block_size=8)


def nan_at_30(layer: FullLayer, start: int, stop: int) -> Tensor:
    scores = constant(layer, start, stop)
    return scores.masked_fill(torch.arange(start, stop) == 30, torch.nan)


@pytest.mark.parametrize("block_size", [1, 8, 1000])
def test_nan_scores_are_an_error_in_any_block(block_size: int) -> None:
    layer = random_layer(60)
    with pytest.raises(SelectorError, match=r"'given' gave NaN scores in layer 1; nothing was evicted"):
        select_positions(layer, Given(nan_at_30), 25, window_size=16, sinks=4, block_size=block_size)


@pytest.mark.parametrize(
    "function",
    [
        lambda layer, start, stop: torch.ones(1, 4, stop - start),
        lambda layer, start, stop: torch.ones(1, 2, stop - start + 1),
        lambda layer, start, stop: torch.ones(2, stop - start),
        lambda layer, start, stop: torch.ones(1, 2, 60),
    ],
    ids=["query heads", "one too many", "no batch", "whole prompt"],
)
def test_scores_of_a_wrong_shape_are_an_error(function: Callable[[FullLayer, int, int], Tensor]) -> None:
    with pytest.raises(SelectorError, match=r"gave scores of shape .* where \(1, 2, 8\)"):
        select_positions(random_layer(60), Given(function), 25, window_size=16, sinks=4, block_size=8)


def test_infinite_and_half_precision_scores_are_fine() -> None:
    def scores(layer: FullLayer, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, dtype=torch.bfloat16)
        return positions.masked_fill(positions == 10, torch.inf).neg().expand(1, 2, -1)

    kept = select_positions(random_layer(60), Given(scores), 24, window_size=16, sinks=4, block_size=8)
    assert kept.indices[0, 0].tolist() == [*range(8), *range(44, 60)]


def test_no_prompt_leaves_a_trace_in_the_next() -> None:
    config = PrefillConfig(kept_tokens=24)
    selector = SnapKV()
    other, layer = random_layer(90, seed=5), random_layer(60)
    alone = select_positions(layer, selector, 24, window_size=16, sinks=4, block_size=8).indices
    select_positions(other, selector, 30, window_size=16, sinks=4, block_size=8)
    assert torch.equal(select_positions(layer, selector, 24, window_size=16, sinks=4, block_size=8).indices, alone)
    assert Compressor(config, 3, 60).evidence is None


def test_evidence_sums_the_winning_scores_per_prompt_position() -> None:
    layer = random_layer(60)
    compressor = Compressor(PrefillConfig(kept_tokens=24, kernel_size=5), 3, 60)
    compressor.compress(layer, None)
    compressor.compress(layer, None)
    compressor.compress(layer, 8)  # a sliding layer adds nothing
    expected = torch.zeros(60)
    scores = snapkv_scores(layer.queries, layer.keys, 0.4, kernel_size=5, pooling="max")[0]
    for head in scores:
        for position in kept_positions(head, 60, 24, 16, 4):
            if 4 <= position < 44:
                expected[position] += 2 * head[position]
    assert compressor.evidence is not None
    torch.testing.assert_close(compressor.evidence, expected, rtol=1e-5, atol=1e-7)
