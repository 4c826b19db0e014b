"""Text deltas: whole characters, stop strings that never leak, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode.tokenizers_for_tests import byte_tokenizer, ids_of
from tidekv_llm.decode.text import TextStream

UNICODE = "naïve — 東京 🌊🏴‍☠️ é ñ عربى"


def deltas(ids: list[int], *stop: str) -> tuple[list[str], TextStream]:
    """What comes out per id and at the end, as the engine drives it."""
    stream, out = TextStream(byte_tokenizer(), stop), []
    for token in ids:
        out.append(stream.push(token).text)
        if stream.stopped:
            break
    out.append(stream.finish().text)
    return out, stream


def test_characters_come_whole_when_their_last_byte_is_there() -> None:
    out, stream = deltas(ids_of(UNICODE))
    assert "".join(out) == stream.text == UNICODE
    assert not any("\ufffd" in delta for delta in out)
    assert deltas(ids_of("a🌊b"))[0] == ["a", "", "", "", "🌊", "b", ""]


def test_a_character_cut_off_by_the_end_shows_as_such() -> None:
    out, stream = deltas(ids_of("a🌊")[:-1])
    assert out[:4] == ["a", "", "", ""]
    assert stream.text == "a\ufffd"


def test_special_tokens_leave_no_text() -> None:
    assert deltas([*ids_of("a"), 0, 1, *ids_of("b"), 2])[1].text == "ab"


def test_a_leading_space_is_kept() -> None:
    assert deltas(ids_of(" a  b "))[1].text == " a  b "


def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    out, stream = deltas(ids_of("answer\nQ: more"), "\nQ:")
    assert "".join(out) == stream.text == "answer"
    assert stream.stopped


def test_a_stop_string_of_many_bytes_never_leaks() -> None:
    assert deltas(ids_of("a東京b"), "東京")[1].text == "a"
    assert deltas(ids_of("a東x京b"), "東京")[1].text == "a東x京b"


def test_text_that_turns_out_not_to_stop_is_let_go_at_once() -> None:
    out, _ = deltas(ids_of("a\nQx"), "\nQ:")
    assert out == ["a", "", "", "\nQx", ""]


def test_text_that_is_held_back_is_released_at_the_end() -> None:
    out, stream = deltas(ids_of("a\nQ"), "\nQ:")
    assert out == ["a", "", "", "\nQ"]
    assert stream.text == "a\nQ"
    assert not stream.stopped


def test_the_first_of_several_stop_strings_cuts() -> None:
    assert deltas(ids_of("one two three"), "three", "two")[1].text == "one "
    assert deltas(ids_of("xabcd"), "bcd", "abc")[1].text == "x"


def test_a_repeating_beginning_is_still_found() -> None:
    assert deltas(ids_of("aaaab!"), "aab")[1].text == "aa"
    assert deltas(ids_of("ababac"), "abac")[1].text == "ab"


def test_a_stop_string_at_the_very_beginning_leaves_nothing() -> None:
    out, stream = deltas(ids_of("END"), "END")
    assert out == ["", "", "", ""]
    assert stream.text == ""


def test_a_stop_string_inside_one_token_cuts_it() -> None:
    tokenizer = byte_tokenizer(("a", "b"), ("ab", "c"))
    stream = TextStream(tokenizer, ("b",))
    merged = len(tokenizer) - 1
    assert tokenizer.decode([merged]) == "abc"
    assert stream.push(merged).text == "a"
    assert stream.stopped


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("abQ:\n 東🌊é"), max_size=25),
    st.lists(st.text(alphabet=st.sampled_from("abQ:\n 東🌊"), min_size=1, max_size=4), max_size=3),
)
def test_deltas_add_up_to_the_text_before_the_stop_that_comes_first(text: str, stops: list[str]) -> None:
    out, stream = deltas(ids_of(text), *stops)
    # the stop string that is complete first ends the text; of several at once the earliest start counts
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert "".join(out) == stream.text == expected
    assert stream.stopped == bool(ends)


@pytest.mark.parametrize("length", [300])
def test_long_texts_decode_only_their_last_tokens(length: int) -> None:
    stream = TextStream(byte_tokenizer())
    widths = []
    own = stream._characters._decode

    def decode(ids: list[int]) -> str:
        widths.append(len(ids))
        return own(ids)

    stream._characters._decode = decode  # type: ignore[method-assign]
    for token in ids_of("é" * length):
        stream.push(token)
    assert max(widths) <= 8
