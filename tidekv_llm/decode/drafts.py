"""Drafts from the document: what followed, in the prompt or the answer, when the last tokens stood there before.

An answer about a document quotes it. One step checks several tokens at once for little more than one costs, so the
document's own continuation is tried (prompt look-up; the check is that of speculative decoding, arXiv 2211.17192, with
a draft that is certain of itself). The prompt's ids are all here, whatever the cache has evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Tokens that must agree before what followed them is tried at all.
LEAST_MATCH = 4
# Each draft of which nothing was right asks so many more of the next, up to a most: text that only sounds like the
# document is left alone soon, and a real quotation is still found.
_MORE_PER_MISS = 3
MOST_MATCH = 13
_FIRST_LENGTH = 4
# Places that are compared; more of the same n-gram say little.
_MOST_PLACES = 32


class Drafts:
    """Proposes continuations of a growing text and learns how far to trust them.

    Args:
        prompt: ids of the whole prompt.
        most: longest proposal.
    """

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self._ids, self._most = list(prompt), most
        self._prompt = _Index(np.asarray(self._ids, dtype=np.int64))
        self._answer: dict[tuple[int, ...], list[int]] = {}
        self._length, self._misses = min(_FIRST_LENGTH, most), 0

    def push(self, token: int) -> None:
        """The text goes on with this token."""
        self._ids.append(token)
        end = len(self._ids)
        if end <= LEAST_MATCH:
            return
        # The n-gram before the new token is known only now that something follows it.
        self._answer.setdefault(tuple(self._ids[end - 1 - LEAST_MATCH : end - 1]), []).append(end - 1)

    def propose(self, most: int) -> list[int]:
        """Up to ``most`` tokens that may come next, none if nothing in the text agrees well enough."""
        length = min(self._length, self._most, most)
        if length < 1 or len(self._ids) < LEAST_MATCH:
            return []
        last = tuple(self._ids[-LEAST_MATCH:])
        places = [*self._prompt.after(last), *self._answer.get(last, [])][-_MOST_PLACES:]
        agreeing, place = max(((self._agreeing(place), place) for place in places), default=(0, 0))
        if agreeing < min(MOST_MATCH, LEAST_MATCH + _MORE_PER_MISS * self._misses):
            return []
        return self._ids[place : place + length]

    def judge(self, drafted: int, accepted: int) -> None:
        """How many of a proposal's tokens were right."""
        if drafted and not accepted:
            self._misses += 1
        elif accepted:
            self._misses = 0
        if drafted:
            self._length = max(2, 2 * accepted if accepted == drafted else accepted + 1)

    def _agreeing(self, place: int) -> int:
        """Tokens before ``place`` that equal the text's last ones, counted up to :data:`MOST_MATCH`."""
        ids, end = self._ids, len(self._ids)
        most = min(MOST_MATCH, place)
        return next((back for back in range(most) if ids[place - 1 - back] != ids[end - 1 - back]), most)


class _Index:
    """Where each n-gram of a fixed text ends: sorted hashes, 16 bytes a token."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        count = max(0, len(ids) - LEAST_MATCH)  # the last n-gram has nothing after it
        hashes = _hash(*(ids[start : start + count] for start in range(LEAST_MATCH)))
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def after(self, ngram: tuple[int, ...]) -> list[int]:
        """Places right after the n-gram, ascending; a hash in common is no harm, since places are compared."""
        wanted = _hash(*(np.asarray([token], dtype=np.int64) for token in ngram))[0]
        first, end = np.searchsorted(self._hashes, wanted, "left"), np.searchsorted(self._hashes, wanted, "right")
        return [int(place) + LEAST_MATCH for place in self._order[max(first, end - _MOST_PLACES) : end]]


def _hash(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    mixed = np.zeros_like(columns[0])
    for column in columns:
        mixed = mixed * np.int64(0x5851F42D4C957F2D) + column  # wraps around on purpose
    return mixed
