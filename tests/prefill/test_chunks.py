"""Cutting the prompt, and the progress that follows from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidekv_llm.prefill.chunks import Chunk, last_layer_chunks, plan_chunks


def positions(chunks: list[Chunk] | tuple[Chunk, ...]) -> list[int]:
    return [position for chunk in chunks for position in range(chunk.start, chunk.stop)]


@given(st.integers(1, 60), st.integers(1, 70), st.data())
def test_chunks_cover_the_prompt_in_order_and_cut_at_the_boundary(
    length: int, chunk_size: int, data: st.DataObject
) -> None:
    boundary = data.draw(st.integers(0, length))
    chunks = plan_chunks(length, chunk_size, (boundary,))
    assert positions(chunks) == list(range(length))
    assert all(1 <= len(chunk) <= chunk_size for chunk in chunks)
    assert boundary in {0, *(chunk.stop for chunk in chunks)}


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 70))
def test_last_layer_chunks_need_outputs_of_the_tail_only(length: int, chunk_size: int, tail: int) -> None:
    steps = last_layer_chunks(plan_chunks(length, chunk_size), tail)
    assert positions([chunk for chunk, _ in steps]) == list(range(length))
    needed = positions([chunk for chunk, outputs_needed in steps if outputs_needed])
    assert needed == list(range(max(0, length - tail), length))


def test_the_examples_of_the_docstrings() -> None:
    assert plan_chunks(10, 4, (7,)) == (Chunk(0, 4), Chunk(4, 7), Chunk(7, 10))
    assert last_layer_chunks((Chunk(0, 8), Chunk(8, 10)), 4) == (
        (Chunk(0, 6), False),
        (Chunk(6, 8), True),
        (Chunk(8, 10), True),
    )


@pytest.mark.parametrize("length", [1, 2, 100])
def test_one_chunk_when_the_prompt_fits(length: int) -> None:
    assert plan_chunks(length, 100) == (Chunk(0, length),)
