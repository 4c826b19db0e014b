"""Lines and sentences are found in any script, and a key of one scores as the best of it."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compress.layers import random_layer
from tests.integrations.tiny import tiny_tokenizer
from tidekv_llm.compress.layer_end import select_positions
from tidekv_llm.compress.selectors import SnapKV
from tidekv_llm.passages import LONGEST, SHORTEST, Passages


class Pieces:
    """A tokenizer of given pieces: token n is the n-th one. Bytes are a part of a character."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, ids: list[int], **options: object) -> str:
        return b"".join(self.pieces[token] for token in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.pieces[token].decode(errors="replace").replace(" ", "\u2581")


def split(*pieces: str | bytes) -> list[str]:
    tokenizer = Pieces(*pieces)
    ends = Passages.of(tokenizer, range(len(pieces))).ends
    return [tokenizer.decode(list(range(*span))) for span in zip((0, *ends), ends, strict=False)]


def sentence(end: str | bytes) -> list[str | bytes]:
    return [" word"] * SHORTEST + [end]


def test_a_line_is_a_passage_however_short() -> None:
    assert split("Name", ":", "\n", "Ida", "\n\n", "Age") == ["Name:\n", "Ida\n\n", "Age"]


def test_sentences_end_at_the_stops_of_any_script() -> None:
    for stop in (".", "!", "?", '."', "\u3002", "\uff01", "\u061f", "\u0964", "\u06d4", "\u1362"):
        parts = split(*sentence(stop), " next")
        assert parts == [" word" * SHORTEST + stop, " next"], stop


def test_a_stop_inside_a_number_or_an_abbreviation_ends_nothing() -> None:
    assert len(split(*sentence("."), "14", " is", " pi")) == 1
    assert len(split(" Dr", ".", " Holm", " came")) == 1
    assert len(split(*sentence(" 3"), ".", "14")) == 1


def test_scripts_without_spaces_need_none_behind_the_stop() -> None:
    assert len(split(*["\u4eba"] * SHORTEST, "\u3002", "\u6b21")) == 2


def test_a_stop_that_is_several_tokens_is_found() -> None:
    first, second, third = (bytes([byte]) for byte in "\u0964".encode())
    assert len(split(*sentence(first), second, third, " next")) == 2


def test_a_long_line_is_cut() -> None:
    assert [len(part) for part in split(*["x"] * (2 * LONGEST + 5))] == [LONGEST, LONGEST, 5]


@given(st.text(alphabet="ab .?!\n\u3002", min_size=1, max_size=400))
@settings(max_examples=50, deadline=None)
def test_every_token_is_in_one_passage(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ends = Passages.of(tokenizer, ids).ends
    lengths = [stop - start for start, stop in zip((0, *ends), ends, strict=False)]
    assert sum(lengths) == len(ids) and all(0 < length <= LONGEST for length in lengths)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_the_highest_of_a_passage_stands_at_all_its_positions(lengths: list[int], data: st.DataObject) -> None:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    passages = Passages(ends)
    start = data.draw(st.integers(0, ends[-1] - 1))
    left, right = passages.around(start, data.draw(st.integers(start + 1, ends[-1])))
    assert {left, right} <= {0, *ends}
    values = torch.rand(2, right - left)
    found = passages.highest(values, left)
    for first, last in zip((0, *ends), ends, strict=False):
        if left <= first and last <= right:
            part = slice(first - left, last - left)
            assert torch.equal(found[:, part], values[:, part].amax(-1, keepdim=True).expand(-1, last - first))


def _layer(length: int, passages: Passages):  # type: ignore[no-untyped-def]
    return dataclasses.replace(random_layer(length), passages=passages)


def test_a_line_stays_or_goes_as_a_whole() -> None:
    """In every head at most one passage is cut: the last one, by the budget."""
    ends = [*range(7, 400, 7), 400]
    layer = _layer(400, Passages(ends))
    selector = SnapKV(pooling="passage")
    for block_size in (32, 64, 1000):
        kept = select_positions(layer, selector, 120, window_size=16, sinks=0, block_size=block_size)
        for head in kept.scored[0]:
            chosen = set(head.tolist())
            spans = [range(first, min(last, 384)) for first, last in zip([0, *ends], ends, strict=False) if first < 384]
            torn = [span for span in spans if 0 < len(chosen.intersection(span)) < len(span)]
            assert len(torn) <= 1


def test_what_stays_does_not_depend_on_the_block_size() -> None:
    layer = _layer(400, Passages([5, 60, 61, 130, 200, 290, 333, 400]))
    sizes = [1, 13, 64, 1000]
    kept = [
        select_positions(layer, SnapKV(pooling="passage"), 90, window_size=16, sinks=4, block_size=size).indices
        for size in sizes
    ]
    assert all(torch.equal(each, kept[0]) for each in kept)


def test_without_a_text_the_neighbours_decide() -> None:
    layer = random_layer(200)
    by_passage, by_neighbour = (
        select_positions(layer, SnapKV(pooling=name), 60, window_size=16, sinks=4, block_size=64).indices
        for name in ("passage", "max")
    )
    assert torch.equal(by_passage, by_neighbour)
