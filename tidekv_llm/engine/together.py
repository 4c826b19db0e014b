"""Many questions at once: each reads its prompt, and what is being answered is decoded as one batch.

    start -> start -> ... -> step of all -> step of all -> one has ended: start the next -> ...

The linear maps, which are most of a step, run once for all; each answer attends to its own cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tidekv_llm.engine.answers import Answer
from tidekv_llm.engine.decoding import step_together
from tidekv_llm.engine.run import Begun
from tidekv_llm.errors import TideKVError

Outcome = Answer | TideKVError
"""An answer, or what stopped it."""
OnAnswer = Callable[[int, Outcome], None]
"""Told a question's number, from 0, and its outcome."""


def answer_together(starts: Sequence[Callable[[], Begun]], most: int, tell: OnAnswer) -> None:
    """Answer all, at most ``most`` at a time; an error of one leaves the others alone.

    Args:
        starts: read the prompts, one for each question.
        most: how many caches there may be at once.
        tell: told each outcome as it comes.
    """
    waiting, batch = deque(enumerate(starts)), _Batch(tell)
    while waiting or batch.rows:
        while waiting and len(batch.rows) < most:
            batch.add(*waiting.popleft())
        batch.step()


class _Batch:
    """What is being answered, by number."""

    def __init__(self, tell: OnAnswer) -> None:
        self.rows: dict[int, Begun] = {}
        self._tell = tell

    def add(self, number: int, start: Callable[[], Begun]) -> None:
        """Read a prompt and say its answer's first token."""
        try:
            begun = start()
            begun.decoding.start()
        except TideKVError as error:
            self._tell(number, error)
            return
        self.rows[number] = begun
        self._leave_if_done(number)

    def step(self) -> None:
        """One step for all that go on."""
        wanted = {number: tokens for number in list(self.rows) if (tokens := self._wanted(number))}
        if not wanted:
            return
        decodings = [self.rows[number].decoding for number in wanted]
        try:
            logits = step_together(decodings, list(wanted.values()))
        except TideKVError as error:  # their caches are half a step ahead
            for number in wanted:
                self._drop(number, error)
            return
        for number, decoding, tokens in zip(wanted, decodings, wanted.values(), strict=True):
            mine, logits = logits[: len(tokens)], logits[len(tokens) :]
            try:
                decoding.feed(mine)
            except TideKVError as error:
                self._drop(number, error)
            else:
                self._leave_if_done(number)

    def _wanted(self, number: int) -> list[int]:
        try:
            return self.rows[number].decoding.wanted()
        except TideKVError as error:
            self._drop(number, error)
            return []

    def _leave_if_done(self, number: int) -> None:
        if self.rows[number].decoding.done:
            begun = self.rows.pop(number)
            self._tell(number, begun.answer(begun.decoding.finish()))

    def _drop(self, number: int, error: TideKVError) -> None:
        del self.rows[number]
        self._tell(number, error)
