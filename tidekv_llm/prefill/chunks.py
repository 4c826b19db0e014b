"""Where the prompt is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def plan_chunks(prompt_length: int, chunk_size: int, boundaries: Iterable[int] = ()) -> tuple[Chunk, ...]:
    """Chunks in causal order, none of which crosses one of ``boundaries``.

    A cut where the document part ends makes a follow-up question do the same arithmetic as a fresh prefill.
    Example: 10 tokens by 4 with a boundary at 7 gives [0, 4), [4, 7), [7, 10).
    """
    ends = sorted({end for end in boundaries if 0 < end < prompt_length} | {prompt_length})
    chunks, begin = [], 0
    for end in ends:
        for start in range(begin, end, chunk_size):
            chunks.append(Chunk(start, min(start + chunk_size, end)))
        begin = end
    return tuple(chunks)


def last_layer_chunks(chunks: tuple[Chunk, ...], tail: int, uncut: int = 0) -> tuple[tuple[Chunk, bool], ...]:
    """The last layer's chunks, each with whether its outputs are needed: only those of the last ``tail`` tokens.

    Chunks before position ``uncut`` are not cut in two: what is stored of them must be what any other prompt
    computes.
    Example: [0, 8), [8, 10) with a tail of 4 gives ([0, 6), False), ([6, 8), True), ([8, 10), True).
    """
    first_needed = max(0, chunks[-1].stop - tail)
    parts: list[tuple[Chunk, bool]] = []
    for chunk in chunks:
        cut = min(max(first_needed, chunk.start), chunk.stop)
        if chunk.stop <= uncut and chunk.start < cut < chunk.stop:
            cut = chunk.start
        if cut > chunk.start:
            parts.append((Chunk(chunk.start, cut), False))
        if cut < chunk.stop:
            parts.append((Chunk(cut, chunk.stop), True))
    return tuple(parts)
