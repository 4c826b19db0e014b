"""Budgets: exact totals, within their limits, and as the papers' formulas say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.compress.layers import random_layer
from tests.reference.selectors import cake_spread
from tidekv_llm.compress.budgets import (
    ada_head_budgets,
    cake_layer_budgets,
    cake_preference,
    pyramid_layer_budgets,
    uniform_layer_budgets,
)
from tidekv_llm.compress.scoring import window_spread
from tidekv_llm.errors import BudgetError


def pyramid(kept: int, layers: int, length: int, window: int = 16, sinks: int = 4, beta: int = 20) -> list[int]:
    return pyramid_layer_budgets(
        kept, layers, prompt_length=length, window_size=window, sinks=sinks, beta=beta
    )


def test_uniform_is_the_same_everywhere() -> None:
    assert uniform_layer_budgets(7, 3) == [7, 7, 7]


@pytest.mark.parametrize("layers", [1, 2, 30, 32, 80])
@pytest.mark.parametrize(
    ("kept", "length"), [(20, 21), (21, 5000), (512, 7061), (1024, 1500), (4096, 131072), (4096, 4097), (99, 100)]
)
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("beta", [1, 2, 20, 10_000])
def test_pyramid_totals_are_exact_and_budgets_feasible(
    layers: int, kept: int, length: int, sinks: int, beta: int
) -> None:
    budgets = pyramid(kept, layers, length, sinks=sinks, beta=beta)
    assert len(budgets) == layers
    assert sum(budgets) == layers * kept
    assert all(16 + sinks <= budget <= length for budget in budgets)
    assert budgets == sorted(budgets, reverse=True)


def test_pyramid_is_the_papers_line_without_its_drift() -> None:
    # The original rounds to 7980 .. 230 (mean 4105) for these; the exact line is 204.4 + 8 to 7971.6 + 8.
    budgets = pyramid(4096, 32, 131072, window=8, sinks=0)
    assert budgets[0] == 7980
    assert budgets[-1] == 212
    assert sum(budgets) == 32 * 4096
    steps = [a - b for a, b in zip(budgets, budgets[1:], strict=False)]
    assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize("layers", [1, 2, 30])
def test_pyramid_of_a_short_prompt_keeps_everything(layers: int) -> None:
    assert pyramid(512, layers, 512) == [512] * layers
    assert pyramid(512, layers, 3) == [3] * layers


def test_no_schedule_is_frozen_on_the_first_prompt() -> None:
    short = pyramid(512, 30, 600)
    assert pyramid(512, 30, 100_000) != short
    assert pyramid(512, 30, 600) == short


def test_infeasible_budgets_name_the_smallest_feasible() -> None:
    with pytest.raises(BudgetError, match="kept_tokens=19 is below the 20 mandatory.*raise it to 20"):
        pyramid(19, 30, 1000)
    with pytest.raises(BudgetError, match="raise it to 20"):
        cake_layer_budgets([1.0, 1.0], 38, mandatory=20, caps=[100, 100])


@given(
    st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=40),
    st.integers(0, 30),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_cake_totals_are_exact_within_the_limits(
    preferences: list[float], mandatory: int, kept: int, extra: int
) -> None:
    count, length = len(preferences), mandatory + extra
    total = count * (mandatory + kept)
    budgets = cake_layer_budgets(preferences, total, mandatory=mandatory, caps=[length] * count)
    assert sum(budgets) == min(total, count * length)
    assert all(mandatory <= budget <= length for budget in budgets)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=20), st.integers(10, 200))
def test_cake_recut_layer_by_layer_never_lets_one_grow(preferences: list[float], kept: int) -> None:
    total, length, budgets = len(preferences) * kept, 210, list[int]()
    for number in range(1, len(preferences) + 1):
        new = cake_layer_budgets(preferences[:number], total, mandatory=10, caps=[*budgets, length])
        assert sum(new) == min(total, number * length)
        assert all(b <= a for a, b in zip(budgets, new, strict=False))
        budgets = new
    at_once = cake_layer_budgets(preferences, total, mandatory=10, caps=[length] * len(preferences))
    assert all(abs(a - b) <= len(preferences) for a, b in zip(budgets, at_once, strict=True))


def test_cake_is_proportional_above_the_mandatory_part() -> None:
    assert cake_layer_budgets([1, 2, 3], 30 + 60, mandatory=10, caps=[1000] * 3) == [20, 30, 40]
    assert cake_layer_budgets([1, 2, 3], 30 + 60, mandatory=10, caps=[1000, 1000, 30]) == [23, 37, 30]
    assert cake_layer_budgets([0, 0], 40, mandatory=10, caps=[100] * 2) == [20, 20]


@pytest.mark.parametrize("block_size", [1, 7, 4096])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=str)
def test_cakes_entropy_and_variance_equal_the_dense_ones(block_size: int, heads: tuple[int, int]) -> None:
    layer = random_layer(83, heads=heads[0], kv_heads=heads[1], batch=2)
    found = window_spread(layer, block_size)
    assert found == pytest.approx(cake_spread(layer.queries, layer.keys, 0.4), rel=1e-4)
    assert cake_preference(4.0, 9.0, tau_entropy=2.0, tau_variance=2.0) == pytest.approx(6.0)


def test_ada_follows_its_formula_with_the_largest_remainder() -> None:
    assert ada_head_budgets([6, 1, 2], 3, 0.5) == [5, 2, 2]
    assert ada_head_budgets([6, 1, 2], 3, 0.0) == [6, 1, 2]
    assert ada_head_budgets([6, 1, 2], 3, 1.0) == [3, 3, 3]
    assert ada_head_budgets([9, 0, 0], 3, 0.2) == [8, 1, 0]  # 7.8, 0.6, 0.6


@given(st.lists(st.integers(0, 40), min_size=1, max_size=16), st.floats(0, 1))
def test_ada_totals_are_exact(shares: list[int], alpha: float) -> None:
    shares[0] += -sum(shares) % len(shares)
    budget = sum(shares) // len(shares)
    budgets = ada_head_budgets(shares, budget, alpha)
    assert sum(budgets) == len(shares) * budget
    assert all(min(share, budget) <= kept <= max(share, budget) for share, kept in zip(shares, budgets, strict=True))
