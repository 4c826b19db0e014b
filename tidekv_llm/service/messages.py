"""Conversations as callers have them: (role, text) pairs, in whatever order a framework keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidekv_llm.errors import ConfigError

Message = dict[str, str]


def merged_messages(messages: Sequence[tuple[str, str]]) -> list[Message]:
    """The engine's messages: system text first, neighbours of one role as one message.

    Many chat templates insist on turns that alternate, and take system text at the start only.

    Raises:
        ConfigError: no message, or nothing but white space in all of them.
    """
    if not any(text.strip() for _, text in messages):
        raise ConfigError("the prompt is empty; write at least one word")
    system_first = sorted(messages, key=lambda message: message[0] != "system")
    return [{"role": role, "content": text} for _, role, text in _merged((0, *message) for message in system_first)]


def paired_turns(messages: Sequence[tuple[str, str]]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """System text, and (question, answer) pairs: the history of a question about documents.

    Messages without text, such as a call of a tool, are passed over.

    Raises:
        ConfigError: an answer without a question, or a question without an answer; it says which.
    """
    told = [(at, role, text) for at, (role, text) in enumerate(messages) if text.strip()]
    turns = _merged(message for message in told if message[1] != "system")
    if turns and turns[0][1] != "user":
        raise ConfigError(f"history[{turns[0][0]}] is an answer without a question before it; leave it out")
    if len(turns) % 2:
        raise ConfigError(f"history[{turns[-1][0]}] is a question without an answer; ask it, or leave it out")
    system = "\n\n".join(text for _, role, text in told if role == "system")
    return system, tuple((asked[2], answer[2]) for asked, answer in zip(turns[::2], turns[1::2], strict=True))


def _merged(messages: Iterable[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """(place, role, text) with neighbours of one role as one, at the place of the first."""
    merged: list[tuple[int, str, str]] = []
    for at, role, text in messages:
        if merged and merged[-1][1] == role:
            at, role, text = merged[-1][0], role, f"{merged.pop()[2]}\n\n{text}"
        merged.append((at, role, text))
    return merged
