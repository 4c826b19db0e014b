"""One splitter for every script: what is one word to a reader is one word here, whatever its bytes."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.documents.cpu_time import growth
from tidekv_llm.documents.words import fold, is_number, letters, normal, sentences, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The 7,400 litres, at 14.5 °C", "the 7400 litres at 14.5 c"),
        ("ge\u0301rant GÉRANT", "gérant gérant"),
        ("हिन्दी में लिखा हुआ", "हिन्दी में लिखा हुआ"),
        ("বাংলা ভাষা", "বাংলা ভাষা"),
        ("كِتَابٌ", "كتاب"),
        ("בְּרֵאשִׁית", "בראשית"),
        ("می\u200cخواهم", "ميخواهم"),  # the Persian non-joiner stands inside a word; both letters ye are one
        ("İSTANBUL ısparta", "istanbul isparta"),
        ("замо́к ЁЛКА йод", "замок елка йод"),
        ("ΚΑΛΗΜΕΡΑΣ καλημέρας", "καλημερασ καλημερασ"),
        ("灯台の\n高さ", "灯台 台の の高 高さ"),  # a line that ends inside a word
        ("서버는", "서버 버는"),
        ("ที่นี่", "ที่นี่"),
        ("データ・センター", "デー ータ セン ンタ ター"),
        ("通知期是多久？", "通知 知期 期是 是多 多久"),
        ("CO₂ m²", "co 2 m 2"),
    ],
)
def test_words_of_a_script(text, expected):
    assert [unicodedata.normalize("NFC", word) for word in words(text)] == expected.split()


@pytest.mark.parametrize("text", ["7,400", "７４００", "７，４００", "٧٤٠٠", "७४००", "7’400", "7\u202f400"])
def test_a_number_is_the_same_in_all_digits(text):
    assert words(text) == ["7400"]


@pytest.mark.parametrize(("text", "other"), [("10²", "102"), ("2½", "212"), ("7.4", "74"), ("第十一章", "第十二章")])
def test_other_numbers_stay_other_numbers(text, other):
    numbers = [{word for word in words(written) if is_number(word)} for written in (text, other)]
    assert numbers[0] != numbers[1]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("水箱容量为7400升。塔高36米。", 2),
        ("「はい。」次です！？そう", 3),
        ("यह है। वह है।", 2),
        ("هل هذا صحيح؟ نعم.", 2),
        ("Սա է։ Այն է։", 2),
        ("ሰላም ነው። እሺ።", 2),
        ("See No. 4 by St. Mary. J. Smith has 7 of them.", 2),
        ("It is 3.5 m. high, e.g. here", 1),
        ("Tank 7400 l\nTower 36 m\nMast 12 m", 3),
        ("In 1874 the lamp\nwas lit for the first\ntime by 3 men", 1),
    ],
)
def test_sentences_end_where_the_script_ends_them(text, count):
    assert len(sentences(text)) == count


def test_text_without_ends_is_cut_into_windows_that_lose_no_word():
    for text in (" ".join(f"w{n}" for n in range(100)), "".join(chr(0x4E00 + n) for n in range(300))):
        found = sentences(text)
        assert len(found) > 3
        assert set(words(text)) <= {word for sentence in found for word in words(sentence)}


@given(st.text())
def test_folding_twice_is_folding_once(text):
    assert fold(fold(text)) == fold(text)
    assert normal(normal(text)) == normal(text)


@given(st.text(alphabet=st.characters(categories=["L", "M"]), min_size=1))
def test_composed_and_decomposed_text_have_the_same_words(text):
    assert words(unicodedata.normalize("NFC", text)) == words(unicodedata.normalize("NFD", text))


@given(st.text())
def test_letters_know_their_places(text):
    folded, places = letters(text)
    assert len(folded) == len(places)
    assert places == sorted(places)
    assert all(0 <= place < len(text) for place in places)


@pytest.mark.parametrize(
    "unit", ["a", ".", ". ", "。", "\n ", "漢 ", "\u0301", "\u0301\u0316", "1,", "א\u05b0", "A.", "」"]
)
def test_splitting_stays_linear(unit):
    def split(characters: int) -> None:
        text = "a" + unit * (characters // len(unit))
        words(text)
        sentences(text)
        normal(text)

    assert growth(lambda: split(20_000), lambda: split(160_000)) < 24
