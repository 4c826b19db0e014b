"""Sampling against the distribution in plain Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference.sampling import token_probabilities
from tidekv_llm.decode.sampling import Sampler, Sampling
from tidekv_llm.errors import ConfigError

LOGITS = [2.0, -1.0, 3.0, 0.5, 1.0, -4.0, 2.5, 0.0]


def probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    scaled = torch.tensor(logits) / sampling.temperature
    return Sampler(sampling)._filtered(scaled).softmax(dim=-1).tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=20, unique=True),
    st.floats(0.1, 5.0),
    st.integers(0, 25),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.31, 0.01]),
)
def test_the_filtered_distribution_equals_the_plain_one(
    logits: list[int], temperature: float, top_k: int, top_p: float
) -> None:
    scaled = [value / 5 for value in logits]
    expected = token_probabilities(scaled, temperature, top_k, top_p)
    found = probabilities(scaled, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.8}], ids=str)
def test_draws_follow_the_distribution(options: dict[str, float]) -> None:
    sampler, draws = Sampler(Sampling(temperature=0.8, seed=3, **options)), 3000  # type: ignore[arg-type]
    counts = Counter(sampler(torch.tensor(LOGITS)) for _ in range(draws))
    expected = token_probabilities(LOGITS, 0.8, int(options.get("top_k", 0)), options.get("top_p", 1.0))
    for token, probability in enumerate(expected):
        deviation = math.sqrt(draws * probability * (1 - probability)) + 1e-9
        assert abs(counts[token] - draws * probability) <= 5 * deviation
        assert counts[token] == 0 or probability > 0


def test_temperature_zero_takes_the_most_likely_whatever_the_seed() -> None:
    for seed in (None, 0, 1):
        assert Sampler(Sampling(seed=seed))(torch.tensor(LOGITS)) == 2


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=2.0, seed=seed))
        return [sampler(torch.tensor(LOGITS)) for _ in range(40)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(None) != draws(None)


def test_a_seed_neither_reads_nor_moves_the_global_generator() -> None:
    state = torch.get_rng_state()
    Sampler(Sampling(temperature=1.0, seed=5))(torch.tensor(LOGITS))
    Sampler(Sampling(temperature=1.0))(torch.tensor(LOGITS))
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_one_and_a_tiny_top_p_are_greedy() -> None:
    for options in ({"top_k": 1}, {"top_p": 1e-6}):
        sampler = Sampler(Sampling(temperature=5.0, seed=1, **options))  # type: ignore[arg-type]
        assert {sampler(torch.tensor(LOGITS)) for _ in range(50)} == {2}


def test_the_given_logits_are_not_changed() -> None:
    logits = torch.tensor(LOGITS)
    Sampler(Sampling(temperature=0.5, top_k=2, top_p=0.5))(logits)
    assert logits.tolist() == LOGITS


@pytest.mark.parametrize("top_k", [2, 3])
def test_top_k_keeps_k_tokens_even_among_ties(top_k: int) -> None:
    found = probabilities([1.0, 1.0, 1.0, 1.0], Sampling(temperature=1.0, top_k=top_k))
    assert sum(probability > 0 for probability in found) == top_k


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        ({"temperature": math.inf}, "temperature=inf must be at least 0"),
        ({"temperature": math.nan}, "temperature=nan must be at least 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"top_p": math.nan}, "top_p=nan must be above 0"),
        ({"top_k": -1}, "top_k=-1 must be a whole number of at least 0"),
    ],
)
def test_impossible_options_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)  # type: ignore[arg-type]
