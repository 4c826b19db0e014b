"""Reasoning apart from the answer: think tags at the output's start, and named channels.

    <think>so many words</think>The answer.                                       tags
    <|channel|>analysis<|message|>so many words<|end|>
    <|start|>assistant<|channel|>final<|message|>The answer.                      channels

Which of them a model writes is read from its tokenizer's chat template; ``<think>`` is known without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

_DEFAULT_TAGS = ("<think>", "</think>")
_WORD = r"[\w:.-]*(?:think|thought|reason)[\w:.-]*"
# What ends reasoning, and what begins it; X is the name in between.
_SPELLINGS = (
    (re.compile(rf"</({_WORD})>", re.IGNORECASE), "<X>", "</X>"),
    (re.compile(rf"\[/({_WORD})\]", re.IGNORECASE), "[X]", "[/X]"),
    (re.compile(rf"<\|/({_WORD})\|>", re.IGNORECASE), "<|X|>", "<|/X|>"),
    (re.compile(rf"<\|END_((?i:{_WORD}))\|>"), "<|START_X|>", "<|END_X|>"),
    (re.compile(rf"<\|end_of_({_WORD})\|>"), "<|begin_of_X|>", "<|end_of_X|>"),
)
_CHANNEL, _MESSAGE, _START, _END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
_LAST = ("<|return|>", "<|call|>")  # end the whole output
_HEADS = (_START, _CHANNEL)
_ENDS = (_END, *_HEADS, *_LAST)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class Delta(NamedTuple):
    """A piece of output: what is certain of the answer and of the reasoning by now."""

    text: str = ""
    reasoning: str = ""


class Splitter(Protocol):
    """Takes text as it comes, whole characters, and tells answer from reasoning."""

    ended: bool
    """Whether the answer is complete, though no end of sequence has come."""

    def push(self, text: str, *, final: bool = False) -> Delta:
        """What is certain after more text; with ``final``, all that was held back."""


class ReasoningFormat(NamedTuple):
    """How a model marks its reasoning.

    Attributes:
        tags: pairs of what begins and what ends it.
        channels: whether it names channels instead.
    """

    tags: tuple[tuple[str, str], ...] = (_DEFAULT_TAGS,)
    channels: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> ReasoningFormat:
        """The format that a tokenizer's template and its added tokens name."""
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
        template = str(getattr(tokenizer, "chat_template", None) or "")
        if _CHANNEL in template and _MESSAGE in template:
            return cls((), channels=True)
        named = "\n".join((template, *map(str, added.values())))
        found = [
            (begin.replace("X", match), end.replace("X", match))
            for pattern, begin, end in _SPELLINGS
            for match in pattern.findall(named)
        ]
        return cls(tuple(dict.fromkeys((*found, _DEFAULT_TAGS))))

    @property
    def marks(self) -> frozenset[str]:
        """Spellings that must be seen, even where they are special tokens."""
        channels = (_CHANNEL, _MESSAGE, _START, _END, *_LAST) if self.channels else ()
        return frozenset((*channels, *(mark for pair in self.tags for mark in pair)))

    def splitter(self, prompt_end: str) -> Splitter:
        """A splitter for what follows a prompt; some templates end it inside of the reasoning already."""
        if self.channels:
            return ChannelSplitter(_open_channel(prompt_end))
        open_end = next((end for begin, end in self.tags if prompt_end.rstrip().endswith(begin)), "")
        return TagSplitter(self.tags, open_end)


class TagSplitter:
    """Reasoning between tags, at the output's start only: an answer may spell the tags.

    Args:
        tags: pairs of what begins and what ends reasoning.
        open_end: what ends the reasoning that the prompt has begun, empty if it has not.
    """

    ended = False

    def __init__(self, tags: tuple[tuple[str, str], ...], open_end: str = "") -> None:
        self._tags, self._end = tags, open_end
        self._step = self._reasoning if open_end else self._beginning
        self._pending = ""
        self._begun = False

    def push(self, text: str, *, final: bool = False) -> Delta:
        self._pending += text
        out, step = Delta(), None
        while step != self._step:  # a mark that is complete takes the rest to the next step
            step = self._step
            more = step(final)
            out = Delta(out.text + more.text, out.reasoning + more.reasoning)
        return out

    def _beginning(self, final: bool) -> Delta:
        begun = self._pending.lstrip()
        for begin, end in self._tags:
            if begun.startswith(begin):
                self._end, self._step, self._pending = end, self._reasoning, begun[len(begin) :]
                return Delta()
        if final or (begun and not any(begin.startswith(begun) for begin, _ in self._tags)):
            self._step = self._answer
        return Delta()

    def _reasoning(self, final: bool) -> Delta:
        inside, found, rest = self._pending.partition(self._end)
        if found:
            self._step, self._pending = self._gap, rest
            return self._shown(inside.rstrip())
        held = 0 if final else partial_start(inside, (self._end,))
        shown = inside[: len(inside) - held].rstrip()
        self._pending = "" if final else inside[len(shown) :]
        return self._shown(shown)

    def _gap(self, final: bool) -> Delta:
        """White space between reasoning and answer belongs to neither."""
        self._pending = self._pending.lstrip()
        if self._pending:
            self._step = self._answer
        return Delta()

    def _answer(self, final: bool) -> Delta:
        text, self._pending = self._pending, ""
        return Delta(text)

    def _shown(self, reasoning: str) -> Delta:
        reasoning = reasoning if self._begun else reasoning.lstrip()
        self._begun = self._begun or bool(reasoning)
        return Delta("", reasoning)


class ChannelSplitter:
    """Messages with headers; the channel called "final" is the answer, every other one is reasoning.

    Args:
        channel: the one whose message the prompt has begun, empty if it has begun none.
    """

    def __init__(self, channel: str = "") -> None:
        self.ended = False
        self._channel, self._pending = channel, ""
        self._in_header = False
        self._reasoned = self._gap = False

    def push(self, text: str, *, final: bool = False) -> Delta:
        self._pending += text
        out = Delta()
        while True:
            more, again = self._header() if self._in_header else self._body(final)
            out = Delta(out.text + more.text, out.reasoning + more.reasoning)
            if not again:
                return out

    def _header(self) -> tuple[Delta, bool]:
        header, found, rest = self._pending.partition(_MESSAGE)
        if not found:
            return Delta(), False
        name = _CHANNEL_NAME.search(header)
        self._channel, self._pending, self._in_header = name[1] if name else "final", rest, False
        self._gap = self._reasoned
        return Delta(), True

    def _body(self, final: bool) -> tuple[Delta, bool]:
        places = [(place, mark) for mark in _ENDS if (place := self._pending.find(mark)) >= 0]
        if not places:
            held = 0 if final else partial_start(self._pending, _ENDS)
            cut = len(self._pending) - held
            shown, self._pending = self._pending[:cut], self._pending[cut:]
            return self._shown(shown), False
        place, mark = min(places)
        shown, self._pending = self._pending[:place], self._pending[place + len(mark) * (mark not in _HEADS) :]
        out = self._shown(shown)
        self._in_header = mark in _HEADS
        if not self._in_header:
            self.ended = self.ended or mark in _LAST or self._channel == "final"
            self._channel = ""
        return out, True

    def _shown(self, text: str) -> Delta:
        """Text of the open channel; text outside of any message is the answer of a model that names no channel."""
        if not text or self._channel in ("", "final"):
            return Delta(text)
        gap = "\n\n" if self._gap else ""
        self._reasoned, self._gap = True, False
        return Delta("", gap + text)


def _open_channel(prompt_end: str) -> str:
    """The channel whose message has begun at a prompt's end."""
    header, found, begun = prompt_end.rpartition(_MESSAGE)
    names = _CHANNEL_NAME.findall(header)
    return names[-1] if found and names and _END not in begun and _START not in begun else ""


def partial_start(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that begins a mark: ("see Qu", ("Question:",)) gives 2."""
    return max(
        (
            length
            for mark in marks
            for length in range(min(len(mark) - 1, len(text)), 0, -1)
            if text.endswith(mark[:length])
        ),
        default=0,
    )
