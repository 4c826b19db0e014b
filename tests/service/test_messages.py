"""Conversations: merged for a chat template, paired for a question about documents."""

from __future__ import annotations

import pytest

from tidekv_llm.errors import ConfigError
from tidekv_llm.service import merged_messages, paired_turns

S, Q, A = "system", "user", "assistant"


def roles(*messages: tuple[str, str]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in merged_messages(messages)]


def test_neighbours_of_one_role_are_merged() -> None:
    assert roles((Q, "a"), (Q, "b"), (A, "c")) == [(Q, "a\n\nb"), (A, "c")]


def test_a_system_message_between_two_users_leaves_one_user() -> None:
    assert roles((Q, "a"), (S, "be brief"), (Q, "b")) == [(S, "be brief"), (Q, "a\n\nb")]
    assert roles((S, "one"), (Q, "a"), (S, "two")) == [(S, "one\n\ntwo"), (Q, "a")]


@pytest.mark.parametrize("messages", [[], [(Q, " ")], [(S, ""), (Q, "\n")]], ids=str)
def test_nothing_said_is_refused(messages: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match="empty"):
        merged_messages(messages)


@pytest.mark.parametrize(
    ("messages", "system", "turns"),
    [
        ([], "", ()),
        ([(Q, "q"), (A, "a")], "", (("q", "a"),)),
        ([(S, "s"), (Q, "q"), (A, "a")], "s", (("q", "a"),)),
        ([(Q, "q"), (S, "s"), (A, "a"), (S, "t")], "s\n\nt", (("q", "a"),)),
        ([(Q, "q"), (Q, "r"), (A, "a"), (A, "b")], "", (("q\n\nr", "a\n\nb"),)),
        ([(Q, "q"), (A, " "), (Q, "the tool said 4"), (A, "4")], "", (("q\n\nthe tool said 4", "4"),)),
        ([(Q, "q"), (A, "a"), (Q, "r"), (A, "b")], "", (("q", "a"), ("r", "b"))),
    ],
    ids=str,
)
def test_turns_are_paired_by_role(
    messages: list[tuple[str, str]], system: str, turns: tuple[tuple[str, str], ...]
) -> None:
    assert paired_turns(messages) == (system, turns)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([(S, "s"), (Q, "q"), (A, "a"), (Q, "r")], r"history\[3\] is a question without an answer"),
        ([(S, "s"), (A, "Hello!"), (Q, "q"), (A, "a")], r"history\[1\] is an answer without a question"),
        ([(Q, "q")], r"history\[0\] is a question"),
    ],
    ids=str,
)
def test_what_cannot_be_paired_is_named(messages: list[tuple[str, str]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        paired_turns(messages)
