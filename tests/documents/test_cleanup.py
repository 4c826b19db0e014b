"""Clean-up mends what extraction broke, and only that."""

from __future__ import annotations

import pytest

from tests.documents.cpu_time import growth
from tidekv_llm.documents.cleanup import clean_text, find_problem, unreadable_share


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\ufb00 \ufb01 \ufb02 \ufb03 \ufb04 \ufb06", "ff fi fl ffi ffl st"),
        ("10² m and ½ and ™", "10² m and ½ and ™"),
        ("\ufedf\ufe8e", "\u0644\u0627"),  # Arabic presentation forms: lam, alef
        ("adip-\niscing", "adipiscing"),
        ("dan- gerous", "dangerous"),
        ("dan- \ngerous", "dangerous"),
        ("soft\u00ad\nened and hy\u00adphen", "softened and hyphen"),
        ("pre- and post-war", "pre- and post-war"),
        ("well-\nknown, as well-known", "well-known, as well-known"),
        ("Smith-\nJones", "Smith-\nJones"),
        ("pages 3-\n5", "pages 3-\n5"),
        ("a\0b\x07c\u200bd", "abcd"),
        ("one   two\t three \n", "one two three"),
        ("first \n \n\n second", "first\n\nsecond"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("seen\U000e0041\U000e0042 \u202eonly", "seen only"),
        ("می\u200cخواهم", "می\u200cخواهم"),  # the Persian non-joiner is spelling, not decoration
        ("", ""),
    ],
)
def test_clean_text(raw, clean):
    assert clean_text(raw) == clean


def test_cleaning_twice_changes_nothing():
    text = "The of\ufb01ce adip-\niscing.\n\n\n\nNext  one -\n- two"
    assert clean_text(clean_text(text)) == clean_text(text)


def test_lone_surrogates_become_encodable():
    assert clean_text("a\ud800b").encode() == "a\ufffdb".encode()


@pytest.mark.parametrize(
    "text",
    [
        "/g18/g152/g3",
        "(cid:12)(cid:7)",
        "\ufffd\ufffd\ufffd ok",
        "\uffff" * 9,
        "\ue001\ue002\ue003",
        "ABC ͍͋͏͓͑ 123",
    ],
)
def test_garbage_is_noticed(text):
    assert "unreadable" in str(find_problem(text))


def test_letters_of_many_scripts_are_noticed():
    assert find_problem("Ж א क ไ ა ረ አ Ա ꀀ Ꭰ ж ב ख ก ბ ሊ") is not None


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, 3/4 and a/b/c.",
        "日本語テスト、ひらがなと漢字。",
        "حَبيبي habibi حَبيبي",
        "שָׁלוֹם עוֹלָם",
        "ที่นี่มีน้ำ",
        "हिन्दी में लिखा हुआ",
        "Việt Nam: tiếng Việt",
        "The IPA for cat is [kæt]; θ and ∫ are fine.",
        "See /usr/lib/gcc and C:/gamma",
        "",
    ],
)
def test_real_scripts_are_not_called_garbage(text):
    assert find_problem(text) is None


def test_share_is_a_share():
    assert unreadable_share("ab\ufffd\ufffd") == 0.5
    assert unreadable_share("  ") == 0.0


@pytest.mark.parametrize("unit", ["a", "-", "a-", "a- ", " ", "\n", "a-\n", "/g1", "\u034f", "("])
def test_cleaning_stays_linear(unit):
    def clean(characters: int) -> None:
        text = unit * (characters // len(unit))
        clean_text(text)
        find_problem(text)

    # Eight times the text takes about eight times as long; a step that looks back at all of it, 64 times.
    assert growth(lambda: clean(40_000), lambda: clean(320_000)) < 24
