"""PrefillConfig: every impossible value is refused with the value and the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tidekv_llm import PrefillConfig
from tidekv_llm.compress.selectors import Recent
from tidekv_llm.errors import BudgetError, ConfigError, TideKVError

WHOLE = "must be a whole number of at least"
CASES: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"{name}={value!r} {WHOLE} 1")
        for name in ("chunk_size", "kept_tokens", "window_size", "score_block_size", "kernel_size")
        for value in (0, -1, 1.5, "7", None, True)
    ),
    ({"chunk_size": "Auto"}, f"chunk_size='Auto' {WHOLE} 1 or \"auto\""),
    ({"sinks": -1}, f"sinks=-1 {WHOLE} 0"),
    ({"sinks": 1.0}, f"sinks=1.0 {WHOLE} 0"),
    ({"sinks": False}, f"sinks=False {WHOLE} 0"),
    ({"kernel_size": 4}, "kernel_size=4 must be odd; use 5"),
    ({"pooling": "mean"}, "pooling='mean' is unknown; choose one of max, avg, none"),
    ({"attention": "fast"}, "attention='fast' is unknown; choose one of auto, tiled, merge, sdpa, flash"),
    ({"selector": "snap"}, "selector='snap' is unknown; choose one of .*recent, snapkv"),
    ({"selector": 3}, r"selector=3 must be a name \(.*recent, snapkv\) or a Selector"),
    ({"selector": Recent}, "or a Selector"),
    ({"layer_budget": "x"}, "layer_budget='x' is unknown; choose one of uniform"),
    ({"head_budget": "x"}, "head_budget='x' is unknown; choose one of uniform"),
    ({"schedule": "x"}, "schedule='x' is unknown; choose one of tidekv, tidekv-no-evict, post-prefill"),
    ({"pooling": []}, r"pooling=\[\] is unknown"),
]


@pytest.mark.parametrize(("options", "message"), CASES, ids=[str(options) for options, _ in CASES])
def test_an_impossible_option_is_named_with_its_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PrefillConfig(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kept", "window", "sinks"), [(16, 32, 4), (19, 16, 4), (1, 1, 1)])
def test_a_budget_below_window_and_sinks_names_the_smallest_one(kept: int, window: int, sinks: int) -> None:
    total = window + sinks
    message = rf"kept_tokens={kept} must be at least window_size\+sinks={total}; raise kept_tokens to {total} or more"
    with pytest.raises(BudgetError, match=message):
        PrefillConfig(kept_tokens=kept, window_size=window, sinks=sinks)
    PrefillConfig(kept_tokens=total, window_size=window, sinks=sinks)


def test_errors_are_ours_and_value_errors() -> None:
    for kind in (ValueError, TideKVError):
        with pytest.raises(kind):
            PrefillConfig(kept_tokens=1)


def test_unknown_options_are_errors_that_name_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown prefill option 'chunksize'; the options are chunk_size, kept_tok"):
        PrefillConfig().replace(chunksize=7)
    with pytest.raises(TypeError, match="chunksize"):
        PrefillConfig(chunksize=7)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        PrefillConfig(512)  # type: ignore[misc]


def test_replace_validates_and_leaves_the_original() -> None:
    config = PrefillConfig()
    assert config.replace(chunk_size=7) == PrefillConfig(chunk_size=7)
    assert config == PrefillConfig()
    with pytest.raises(ConfigError, match="chunk_size=0"):
        config.replace(chunk_size=0)


def test_a_config_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrefillConfig().chunk_size = 7  # type: ignore[misc]
    assert len({PrefillConfig(), PrefillConfig(), PrefillConfig(sinks=0)}) == 2


def test_a_selector_object_is_taken_as_it_is() -> None:
    assert PrefillConfig(selector=Recent()).selector == Recent()
