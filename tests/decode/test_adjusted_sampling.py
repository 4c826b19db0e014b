"""Penalties, biases, log-probabilities and grammars: against their definitions, with drafts and in batches."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sessions_for_tests import document, engine
from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.decode.drafts import Drafts
from tidekv_llm.decode.sampling import Sampler, Sampling
from tidekv_llm.engine import Answer
from tidekv_llm.errors import ConfigError

LOGITS = torch.tensor([2.0, -1.0, 3.0, 0.5, 1.0, -4.0, 2.5, 0.0])
PROMPT = random_prompt(40)


@functools.cache
def engine_of() -> TideKV:
    return TideKV(tiny_model(), prefill=PrefillConfig(chunk_size=16, kept_tokens=24, window_size=4, sinks=2))


def adjusted(said: list[int], **options: Any) -> list[float]:
    sampler = Sampler(Sampling(**options))
    sampler._said = list(said)
    return sampler._processed(LOGITS).tolist()


def test_penalties_are_those_of_their_definitions() -> None:
    said = [2, 1, 2, 5]
    plain, counts = LOGITS.tolist(), Counter(said)
    assert adjusted(said, repetition_penalty=1.5) == pytest.approx(
        [
            value if token not in counts else value / 1.5 if value > 0 else value * 1.5
            for token, value in enumerate(plain)
        ]
    )
    assert adjusted(said, presence_penalty=0.7, frequency_penalty=0.4) == pytest.approx(
        [value - 0.4 * counts[token] - 0.7 * (token in counts) for token, value in enumerate(plain)]
    )
    assert adjusted(said, logit_bias={0: 5.0, 7: -3.0}) == pytest.approx([7.0, *plain[1:7], -3.0])
    assert adjusted([], repetition_penalty=2.0, presence_penalty=1.0) == pytest.approx(plain)


def test_min_p_keeps_what_reaches_its_share_of_the_best() -> None:
    kept = Sampler(Sampling(temperature=1.0, min_p=0.3))._filtered(LOGITS).softmax(-1)
    probabilities = LOGITS.softmax(-1)
    expected = torch.where(probabilities >= 0.3 * probabilities.max(), probabilities, 0)
    torch.testing.assert_close(kept, expected / expected.sum())


def test_logits_of_the_model_stay_as_they_are() -> None:
    logits = LOGITS.clone()
    sampler = Sampler(Sampling(repetition_penalty=2.0, logit_bias={1: 9.0}, frequency_penalty=1.0))
    for _ in range(4):
        sampler(logits)
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {5: 3.0, 9: -10.0}},
        {"temperature": 0.8, "seed": 3, "min_p": 0.1, "repetition_penalty": 1.2},
    ],
)
def test_drafts_change_no_adjusted_text(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine_of().generate(PROMPT, max_new_tokens=24, ignore_eos=True, drafts=0, **options).token_ids
    assert expected != engine_of().generate(PROMPT, max_new_tokens=24, ignore_eos=True, drafts=0).token_ids

    def half_right(drafts: Drafts, most: int) -> list[int]:
        said = len(drafts._ids) - len(PROMPT)
        return [*expected[said : said + 2], 3, 3][:most]

    monkeypatch.setattr(Drafts, "propose", half_right)
    found = engine_of().generate(PROMPT, max_new_tokens=24, ignore_eos=True, **options)
    assert found.token_ids == expected
    assert found.metrics.accepted_tokens > 0


# --- a grammar ---


class Alternating:
    """Even and odd tokens in turn; it counts by itself, as grammars do, and checks that nothing was skipped."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        assert ids.shape == (1, self.asked)
        self.asked += 1
        forbidden = torch.arange(logits.shape[1]) % 2 == self.asked % 2
        return logits.masked_fill(forbidden[None], -torch.inf)


def alternates(ids: list[int]) -> bool:
    return all((token + place) % 2 == 0 for place, token in enumerate(ids))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 1}, {"logit_bias": {5: 50.0}}])
def test_a_grammar_forbids_tokens_also_inside_drafts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine_of().generate(PROMPT, max_new_tokens=20, ignore_eos=True, grammar=Alternating, drafts=0, **options)
    assert alternates(plain.token_ids)
    monkeypatch.setattr(Drafts, "propose", lambda drafts, most: [4, 5, 5, 4][:most])
    drafted = engine_of().generate(PROMPT, max_new_tokens=20, ignore_eos=True, grammar=Alternating, **options)
    assert drafted.token_ids == plain.token_ids


def test_every_answer_of_a_batch_has_a_grammar_of_its_own() -> None:
    llm, questions = engine(), ["When?", "How high is it?", "Who?"]
    together = llm.ask_many(document(), questions, max_new_tokens=12, grammar=Alternating)
    alone = [llm.ask(document(), question, max_new_tokens=12, grammar=Alternating) for question in questions]
    assert [outcome.text for outcome in together if isinstance(outcome, Answer)] == [answer.text for answer in alone]


def test_a_grammar_that_forbids_everything_is_told_so() -> None:
    def nothing() -> Any:
        return lambda ids, logits: torch.full_like(logits, -torch.inf)

    with pytest.raises(ConfigError, match="after 0 tokens the grammar forbids every token"):
        engine_of().generate(PROMPT, grammar=nothing)
    outcomes = engine().ask_many(document(), ["Who?", "When?"], grammar=nothing)
    assert all(isinstance(outcome, ConfigError) for outcome in outcomes)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit_bias has 97, which is outside the vocabulary of 97"):
        engine_of().generate(PROMPT, logit_bias={97: 1.0})


# --- log-probabilities ---


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 4}, {"repetition_penalty": 1.5}])
def test_log_probabilities_are_the_models_own(options: dict[str, Any]) -> None:
    llm = engine_of().with_prefill(kept_tokens=4096)
    generation = llm.generate(PROMPT, max_new_tokens=6, ignore_eos=True, logprobs=3, **options)
    assert [each.token_id for each in generation.logprobs] == generation.token_ids
    for place, each in enumerate(generation.logprobs):
        expected = llm.prefill([*PROMPT, *generation.token_ids[:place]]).logits.log_softmax(-1)
        assert each.logprob == pytest.approx(float(expected[each.token_id]), abs=1e-4)
        best = expected.topk(3)
        assert [token for token, _ in each.alternatives] == best.indices.tolist()
        assert [value for _, value in each.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_log_probabilities_come_only_where_they_are_asked_for() -> None:
    assert engine_of().generate(PROMPT, max_new_tokens=3).logprobs == ()
    chosen = engine_of().generate(PROMPT, max_new_tokens=3, ignore_eos=True, logprobs=0).logprobs
    assert [each.alternatives for each in chosen] == [(), (), ()]
    answer = engine().ask(document(), "Who?", max_new_tokens=3, logprobs=2)
    assert len(answer.as_dict()["logprobs"]) == len(answer.logprobs) > 0
    assert "logprobs" not in engine().ask(document(), "Who?", max_new_tokens=3).as_dict()
