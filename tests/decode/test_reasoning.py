"""However the output is cut into pieces, answer and reasoning are the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidekv_llm.decode.reasoning import ChannelSplitter, Delta, Splitter, TagSplitter

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
TEXTS = st.lists(st.sampled_from(["a", " ", "\n", "<", "<think>", "</think>", "[THINK]", "[/THINK]", "é"]), max_size=12)
MARKS = [
    "<|channel|>analysis",
    "<|channel|>final",
    "<|message|>",
    "<|end|>",
    "<|start|>assistant",
    "<|return|>",
    "b",
    " ",
    "<|",
]


def split(splitter: Splitter, pieces: list[str]) -> tuple[Delta, bool]:
    out = [splitter.push(piece) for piece in pieces]
    out.append(splitter.push("", final=True))
    return Delta("".join(each.text for each in out), "".join(each.reasoning for each in out)), splitter.ended


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 9), st.sampled_from(["", "</think>"]))
def test_tags_do_not_depend_on_the_pieces(parts: list[str], size: int, open_end: str) -> None:
    text = "".join(parts)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert split(TagSplitter(TAGS, open_end), pieces) == split(TagSplitter(TAGS, open_end), [text])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(MARKS), max_size=14), st.integers(1, 9), st.sampled_from(["", "analysis", "final"]))
def test_channels_do_not_depend_on_the_pieces(parts: list[str], size: int, channel: str) -> None:
    text = "".join(parts)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert split(ChannelSplitter(channel), pieces) == split(ChannelSplitter(channel), [text])


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab <>/\n", max_size=20))
def test_text_without_tags_comes_through_as_it_is(text: str) -> None:
    assert split(TagSplitter(TAGS), list(text))[0] == Delta(text)
    assert split(ChannelSplitter(), list(text))[0] == Delta(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", Delta("b", "a")),
        (" \n<think> a \n</think> \nb ", Delta("b ", "a")),
        ("[THINK]a</think>[/THINK]b", Delta("b", "a</think>")),
        ("<think>a", Delta("", "a")),
        ("<think>a</thin", Delta("", "a</thin")),
        ("<think>a</think>", Delta("", "a")),
        ("a<think>b</think>", Delta("a<think>b</think>", "")),
        ("<think>a</think><think>b</think>c", Delta("<think>b</think>c", "a")),
    ],
)
def test_tags_count_at_the_start_only(text: str, expected: Delta) -> None:
    assert split(TagSplitter(TAGS), list(text))[0] == expected
