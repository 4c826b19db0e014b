"""Clean-up mends what extraction broke, and only that."""

from __future__ import annotations

import pytest

from tests.documents.cpu_time import growth
from tidekv_llm.documents.cleanup import clean_text, join_hyphens
from tidekv_llm.documents.readable import find_problem, unreadable_share


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\ufb00 \ufb01 \ufb02 \ufb03 \ufb04 \ufb06", "ff fi fl ffi ffl st"),
        ("10² m and ½ and ™", "10² m and ½ and ™"),
        ("\ufedf\ufe8e", "\u0644\u0627"),  # Arabic presentation forms: lam, alef
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


@pytest.mark.parametrize(
    ("page", "mended"),
    [
        ("adip-\niscing", "adipiscing"),
        ("Verant-\nwortung für Schön-\nheit", "Verantwortung für Schönheit"),
        ("ge\u0301-\nrant, confi\u00e9-\nment", "gérant, confiément"),
        ("соглас-\nование", "согласование"),
        ("soft\u00ad\nened and hy\u00adphen", "softened and hyphen"),
        ("well-\nknown, as well-known", "well-known, as well-known"),
        ("a dan- gerous reef, more dangerous", "a dangerous reef, more dangerous"),  # the page itself is the evidence
    ],
)
def test_hyphens_at_a_line_end_or_with_evidence_join(page, mended):
    assert join_hyphens([clean_text(page)]) == [mended]


@pytest.mark.parametrize(
    "page",
    [
        "Ein- bzw. Ausfuhr",
        "low- versus high-dose",
        "x = a- b",
        "x = a-\nb",
        "--no- deps",
        "dan- gerous",
        "pre- and post-war",
        "Vor-\nund Nachteile",
        "avant- ou après-vente",
        "до- и послевоенный",
        "Smith-\nJones",
        "pages 3-\n5",
    ],
)
def test_hyphens_without_evidence_stay(page):
    assert join_hyphens([clean_text(page)]) == [page]


def test_pages_bear_witness_for_each_other():
    assert join_hyphens(["a dan- gerous reef", "It is dangerous."])[0] == "a dangerous reef"
    assert join_hyphens(["a long-\nterm plan", "The Long-term view."])[0] == "a long-term plan"
    assert join_hyphens(["the te-\nnor sang", "a tenor and a bass"])[0] == "the tenor sang"


def test_cleaning_twice_changes_nothing():
    text = "The of\ufb01ce adip-\niscing.\n\n\n\nNext  one -\n- two"
    assert clean_text(clean_text(text)) == clean_text(text)
    assert join_hyphens(join_hyphens([text])) == join_hyphens([text])


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
        "Ð¿Ñ€Ð¸Ð²ÐµÑ‚ Ð¼Ð¸Ñ€",
        "æ—¥æœ¬èªž",
        "ABC ͍͋͏͓͑ 123",
    ],
)
def test_garbage_is_noticed(text):
    assert "unreadable" in str(find_problem(text))


def test_words_of_many_scripts_are_noticed():
    assert find_problem("Жאa ßжბ कกЖრ ሰßa Αбց") is not None


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, 3/4 and a/b/c.",
        "日本語テスト、ひらがなと漢字。",
        "データ・センターのサーバーは時々止まる。人々はＡＢＣです。㍿の①と〆切り",
        "Warning Achtung Внимание Προσοχή تحذير אזהרה चेतावनी সতর্কতা எச்சரிக்கை คำเตือน 警告 경고 გაფრთხილება",
        "Ж א क ไ ა ረ አ Ա ꀀ Ꭰ ж ב ख ก ბ ሊ",  # single letters, as in a table of alphabets
        "서버API를 漢字混用으로 kΩ, μm, ΔT, Größe und naïve façade",
        "בְּרֵאשִׁ֖ית בָּרָ֣א אֱלֹהִ֑ים אֵ֥ת הַשָּׁמַ֖יִם",
        "CAFÉ» MAÇÔ à\u00a0« Paris »",
        "tie\u0302\u0301ng Vie\u0323\u0302t",
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
        join_hyphens([text])

    # Eight times the text takes about eight times as long; a step that looks back at all of it, 64 times.
    assert growth(lambda: clean(40_000), lambda: clean(320_000)) < 24
