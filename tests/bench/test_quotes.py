"""Identifiers to be copied: every value stands once in its prompt, and only the whole of it counts."""

from __future__ import annotations

import itertools

import pytest

from tests.integrations.tiny import save_tiny_chat
from tidekv_llm.bench.quotes import EVERYTHING, KINDS, SETTINGS, Quote, find, make_prompt, tabulate
from tidekv_llm.engine import TideKV
from tidekv_llm.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("model")))


def test_the_value_stands_once_in_a_prompt_of_the_wished_length(model: str) -> None:
    with TideKV.from_pretrained(model) as llm:
        assert llm.tokenizer is not None
        for kind, index in itertools.product(KINDS, (0, 3)):
            ids, value = make_prompt(llm, 1500, kind, index, 4)
            assert (ids, value) == make_prompt(llm, 1500, kind, index, 4)
            assert 1500 - 200 < len(ids) <= 1500
            assert llm.tokenizer.decode(ids).count(value) == 1


def test_every_setting_answers_with_every_budget(model: str) -> None:
    quotes = find(model=model, prompt_tokens=800, kept_tokens=[100, 200], kind="sum", index=0, limit=1)["quotes"]
    asked = [(quote["setting"], quote["kept_tokens"]) for quote in quotes]
    assert asked == [(EVERYTHING, 0), *((name, kept) for kept in (100, 200) for name in SETTINGS)]
    assert all(row["questions"] == 1 for row in tabulate([Quote(**quote) for quote in quotes]))


def test_a_part_of_a_value_is_wrong() -> None:
    assert Quote("", 1, "url", "https://a.example/1?page=2", "It is https://a.example/1?page=2.").right
    assert not Quote("", 1, "url", "https://a.example/1?page=2", "https://a.example/1").right


def test_a_prompt_too_short_for_two_lines_is_refused(model: str) -> None:
    with TideKV.from_pretrained(model) as llm, pytest.raises(ConfigError, match="--prompt-tokens=80 is too few"):
        make_prompt(llm, 80, "uuid", 0, 1)
