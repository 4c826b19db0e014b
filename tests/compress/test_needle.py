"""The real embedded model finds a number in 7,000 tokens through what the selectors keep.

One prefill per depth serves all selectors (:class:`tidekv_llm.compress.fan_out.FanOut`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidekv_llm.bench.selectors import Outcome, sweep
from tidekv_llm.engine import TideKV

DEPTHS = (0.1, 0.5, 0.9)
BUDGETS = (512, 1024)
CHOICES = {
    "snapkv": {},
    "chunkkv": {"selector": "chunkkv"},
    "keydiff": {"selector": "keydiff"},
    "ada": {"head_budget": "ada"},
    "recent": {"selector": "recent"},
}


@pytest.fixture(scope="module")
def outcomes(embedded_model_path: Path) -> Iterator[dict[tuple[str, int], Outcome]]:
    with TideKV.from_pretrained("smollm2-135m") as llm:
        found = sweep(llm, list(CHOICES.values()), kept_tokens=BUDGETS, depths=DEPTHS)
    names = [(name, kept) for kept in BUDGETS for name in CHOICES]
    yield dict(zip(names, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kept", BUDGETS)
@pytest.mark.parametrize("name", ["snapkv", "chunkkv", "keydiff", "ada"])
def test_the_needle_is_found_at_every_depth(
    outcomes: dict[tuple[str, int], Outcome], name: str, kept: int
) -> None:
    outcome = outcomes[name, kept]
    assert outcome.found == (True, True, True), outcome.answers


@pytest.mark.slow
@pytest.mark.parametrize("kept", BUDGETS)
def test_recent_tokens_alone_do_not_hold_it(outcomes: dict[tuple[str, int], Outcome], kept: int) -> None:
    # At 90% depth the needle lies about 700 tokens before the end: outside 512, inside 1,024.
    assert outcomes["recent", kept].found == (False, False, kept == 1024), outcomes["recent", kept].answers
