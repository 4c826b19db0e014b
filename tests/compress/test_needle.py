"""The real embedded model finds a number in 7,000 tokens through what the selectors keep.

One prefill per depth serves all selectors (:class:`tidekv_llm.compress.fan_out.FanOut`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tidekv_llm.bench.selectors import Outcome, sweep
from tidekv_llm.engine import TideKV

DEPTHS = (0.1, 0.5, 0.9)
BUDGETS = (512, 1024)
CHOICES = {
    "snapkv": {},
    "chunkkv": {"selector": "chunkkv"},
    "pyramid": {"layer_budget": "pyramid"},
    "cake": {"layer_budget": "cake"},
    "ada": {"head_budget": "ada"},
    "recent": {"selector": "recent"},
}


@pytest.fixture(scope="module")
def outcomes(embedded_model_path: Path) -> dict[tuple[str, int], Outcome]:
    with TideKV.from_pretrained("smollm2-135m") as llm:
        found = sweep(llm, list(CHOICES.values()), kept_tokens=BUDGETS, depths=DEPTHS)
    names = [(name, kept) for kept in BUDGETS for name in CHOICES]
    return dict(zip(names, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [("snapkv", 512), ("snapkv", 1024), ("ada", 512), ("ada", 1024), ("pyramid", 512), ("cake", 512)],
)
def test_the_needle_is_found_at_every_depth(outcomes: dict[tuple[str, int], Outcome], name: str, kept: int) -> None:
    outcome = outcomes[name, kept]
    assert outcome.found == (True, True, True), outcome.answers


@pytest.mark.slow
def test_chunks_hold_the_needle_but_for_a_digit_across_a_boundary(
    outcomes: dict[tuple[str, int], Outcome],
) -> None:
    # Chunks of 20 tokens are cut without regard to the text: the seventh digit can lie in the next chunk.
    answers = outcomes["chunkkv", 1024].answers
    assert all("742236" in answer for answer in answers), answers


@pytest.mark.slow
@pytest.mark.parametrize("kept", BUDGETS)
def test_recent_tokens_alone_do_not_hold_it(outcomes: dict[tuple[str, int], Outcome], kept: int) -> None:
    # At 90% depth the needle lies about 640 tokens before the end: outside 512, inside 1,024.
    assert outcomes["recent", kept].found == (False, False, kept == 1024), outcomes["recent", kept].answers
