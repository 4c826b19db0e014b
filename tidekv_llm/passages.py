"""Passages: the lines and sentences of a prompt, found in its token ids, in any script.

What a question attends to is a key and the first tokens of its value; the rest of the line stands behind. A selector
that keeps whole passages does not tear what must be copied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import regex
import torch
from torch import Tensor

LONGEST = 96  # tokens; a longer line is cut, so that one passage never takes a whole budget
SHORTEST = 8  # tokens before a full stop may end a passage: "Dr.", "No." and "p. 5" do not

# What a token ends, by its text. A stop of a script with spaces ends a sentence only before a space: 3.14 goes on.
_NOTHING, _SENTENCE, _SENTENCE_BEFORE_SPACE, _LINE = range(4)
_CLOSING = r"[\p{Pe}\p{Pf}\p{Pi}\"']*"
_STOP = regex.compile(rf"[\p{{Sentence_Terminal}}--[.?!]]{_CLOSING}$", regex.V1)
_ASCII_STOP = regex.compile(rf"[.?!]{_CLOSING}$", regex.V1)
_SPACES = (" ", "\n", "\u0120", "\u010a", "\u2581")  # also as byte-level and SentencePiece tokens spell them

_BROKEN = "\ufffd"  # part of a character: its other bytes are in the tokens around

Kind = tuple[int, bool]
"""What a token ends, and whether it begins with a space."""

# tokenizer -> ids of one token, or of the few that spell a character together -> what the last of them ends
_known: WeakKeyDictionary[Any, dict[tuple[int, ...], Kind | None]] = WeakKeyDictionary()


class Passages:
    """Where the passages of a prompt of S tokens end.

    Args:
        ends: exclusive ends, ascending; the last one is S. Example: 7 tokens in passages of 3 and 4 are (3, 7).
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        lengths = torch.tensor([stop - start for start, stop in zip((0, *ends), ends, strict=False)])
        numbers = torch.arange(len(self.ends)).repeat_interleave(lengths)  # int64 [S]
        self._numbers = {numbers.device: numbers}

    @classmethod
    def of(cls, tokenizer: Any, token_ids: Sequence[int]) -> Passages:
        """The passages of a prompt."""
        return cls(_ends(_kinds(tokenizer, token_ids)))

    def __len__(self) -> int:
        return len(self.ends)

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """The positions of all passages that [start, stop) touches. Example: (4, 5) of ends (3, 7) gives (3, 7)."""
        first = bisect_right(self.ends, start)
        return (self.ends[first - 1] if first else 0), self.ends[bisect_left(self.ends, stop)]

    def highest(self, values: Tensor, start: int) -> Tensor:
        """Each passage's highest value at all of its positions: ``values`` [..., n] of the positions from ``start``."""
        numbers = self._on(values.device)[start : start + values.shape[-1]]
        places = (numbers - numbers[0]).expand_as(values)
        count = self._number(start + values.shape[-1] - 1) - self._number(start) + 1
        best = values.new_full((*values.shape[:-1], count), -torch.inf).scatter_reduce_(-1, places, values, "amax")
        return best.gather(-1, places)

    def _number(self, position: int) -> int:
        return bisect_right(self.ends, position)

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._numbers:
            self._numbers[device] = next(iter(self._numbers.values())).to(device)
        return self._numbers[device]


def _kinds(tokenizer: Any, token_ids: Sequence[int]) -> list[Kind]:
    """What every token ends; of tokens that spell a character together only the last can end something."""
    known = _known.setdefault(tokenizer, {})
    kinds: list[Kind] = []
    together: tuple[int, ...] = ()
    for token in token_ids:
        together = (*together, token)[-4:]  # no character has more bytes
        if together not in known:
            known[together] = _kind(tokenizer, together)
        kind = known[together]
        kinds.append(kind or (_NOTHING, False))
        together = together if kind is None else ()
    return kinds


def _kind(tokenizer: Any, ids: tuple[int, ...]) -> Kind | None:
    """None for ids that end within a character."""
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    if text.endswith(_BROKEN):
        return None
    opens = text[:1].isspace() or (tokenizer.convert_ids_to_tokens(ids[0]) or "").startswith(_SPACES)
    if "\n" in text:
        return _LINE, opens
    if _STOP.search(text):
        return _SENTENCE, opens
    return (_SENTENCE_BEFORE_SPACE if _ASCII_STOP.search(text) else _NOTHING), opens


def _ends(kinds: Sequence[Kind]) -> list[int]:
    ends: list[int] = []
    start = 0
    for stop, ((kind, _), (_, opens)) in enumerate(zip(kinds, (*kinds[1:], (_NOTHING, True)), strict=True), start=1):
        length = stop - start
        sentence = kind == _SENTENCE or (kind == _SENTENCE_BEFORE_SPACE and opens)
        if kind == _LINE or (sentence and length >= SHORTEST) or length == LONGEST or stop == len(kinds):
            ends.append(stop)
            start = stop
    return ends
