"""The real embedded model finds a number in 7,000 tokens through what the selectors keep.

One prefill per depth serves all selectors (:class:`tidekv_llm.compress.fan_out.FanOut`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidekv_llm.bench.needle import HAYSTACKS, make_needle
from tidekv_llm.bench.selectors import Outcome, ask
from tidekv_llm.engine import TideKV

DEPTHS = (0.1, 0.5, 0.9)
BUDGETS = (512, 1024)
CHOICES = {
    "snapkv": {},
    "chunkkv": {"selector": "chunkkv"},
    "keydiff": {"selector": "keydiff"},
    "pyramid": {"layer_budget": "pyramid"},
    "cake": {"layer_budget": "cake"},
    "ada": {"head_budget": "ada"},
    "recent": {"selector": "recent"},
}


@pytest.fixture(scope="module")
def llm(embedded_model_path: Path) -> Iterator[TideKV]:
    with TideKV.from_pretrained("smollm2-135m") as engine:
        yield engine


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_has_its_length_its_depth_and_one_number(llm: TideKV, haystack: str, depth: float) -> None:
    needle = make_needle(llm, 1500, depth, "9051847", haystack)
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(needle.token_ids)
    assert 1500 - 60 < len(needle.token_ids) <= 1500  # a sentence of the manual has up to 200 characters
    assert text.count("9051847") == 1
    place = llm.tokenizer(text[: text.index("9051847")], add_special_tokens=False).input_ids
    assert abs(len(place) / 1500 - depth) < 0.08


@pytest.fixture(scope="module")
def outcomes(llm: TideKV) -> dict[tuple[str, int], list[Outcome]]:
    """Per selector and budget, one outcome per depth."""
    names = [(name, kept) for kept in BUDGETS for name in CHOICES]
    found: dict[tuple[str, int], list[Outcome]] = {name: [] for name in names}
    for depth in DEPTHS:
        asked = ask(llm, list(CHOICES.values()), BUDGETS, 7000, haystack="noise", number="7422361", depth=depth)
        for name, outcome in zip(names, asked[1:], strict=True):
            found[name].append(outcome)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kept", BUDGETS)
@pytest.mark.parametrize("name", ["snapkv", "chunkkv", "ada", "pyramid", "cake"])
def test_the_needle_is_found_at_every_depth(
    outcomes: dict[tuple[str, int], list[Outcome]], name: str, kept: int
) -> None:
    assert [outcome.found for outcome in outcomes[name, kept]] == [True, True, True], outcomes[name, kept]


@pytest.mark.slow
@pytest.mark.parametrize("kept", BUDGETS)
def test_recent_tokens_alone_do_not_hold_it(outcomes: dict[tuple[str, int], list[Outcome]], kept: int) -> None:
    # At 90% depth the needle lies about 700 tokens before the end: outside 512, inside 1,024.
    found = [outcome.found for outcome in outcomes["recent", kept]]
    assert found == [False, False, kept == 1024], outcomes["recent", kept]
