"""Citations: three sources, one page each, and no claim that the page does not bear out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tidekv_llm.documents import Document, PageSpan, cite_pages
from tidekv_llm.documents.prompt import document_names

PAGES = [
    "The harbour office listens at all hours. The emergency channel of the harbour office is channel 12.",
    "The main fuel tank holds 7,400 litres. It is filled by the tanker Brenna every April.",
    "The harbour master is Tobias Renn, who was appointed in 2016.\nHis deputy is Halla Brekke.",
    "Grey seals have their young on the western skerries. No boat may come closer than 200 metres.",
]
BOOK = Document.from_pages(PAGES, "book.pdf", ["i", "1", "2", "A-3"])
SPANS = [PageSpan(0, n + 1, label, 10 * n + 5, 10 * n + 15) for n, label in enumerate(["i", "1", "2", "A-3"])]


def places(answer, evidence=None, **options):
    return [(c.label, c.origin, c.verified) for c in cite_pages(answer, SPANS, BOOK, evidence, **options)]


def test_words_and_numbers_lead_to_their_page_and_sentence():
    (citation,) = cite_pages("It holds 7400 litres of fuel.", SPANS, BOOK)
    assert (citation.page, citation.label, citation.origin, citation.verified) == (2, "1", "text", True)
    assert citation.quote == "The main fuel tank holds 7,400 litres."
    assert citation.document_name == "book.pdf"


def test_two_facts_are_two_pages():
    answer = "The harbour master is Tobias Renn. The tanker Brenna fills the tank every April."
    assert sorted(places(answer)) == [("1", "text", True), ("2", "text", True)]


def test_a_wrong_number_finds_the_page_but_is_not_verified():
    assert places("The main fuel tank holds 2,000 litres.") == [("1", "text", False)]
    assert places("The main fuel tank holds 2,000 litres [p. 1].") == [("1", "text", False)]


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "...",
        "The capital of France is Paris.",
        "I don't know.",
        "The document does not say.",
        "Yes.",
        "🙂",
    ],
)
def test_unrelated_answers_cite_nothing(answer):
    assert places(answer) == []


def test_the_question_places_a_bare_answer():
    assert places("12.", question="What is the emergency channel of the harbour office?") == [("i", "text", True)]
    assert places("12.", question="How many people climb mountains?") == []


def test_markers_are_mapped_back_and_checked():
    assert places("The master is Tobias Renn [p. 2].") == [("2", "model", True)]
    assert places("Seals have their young there (page A-3).") == [("A-3", "model", True)]
    assert places("The moon is made of cheese [p. I].") == [("i", "model", False)]
    assert places("The moon is made of cheese [p. 77].") == []


def test_lists_and_ranges_of_markers():
    assert {label for label, *_ in places("Nonsense [pp. 1-2, A-3]")} == {"1", "2", "A-3"}
    assert {label for label, *_ in places("Nonsense [p. 1] [p. 2]")} == {"1", "2"}
    assert places("Nonsense [p. 1-999999]")[0][0] == "1"


def test_quotations_are_checked_to_the_letter():
    good = cite_pages('It says "harbour master is Tobias Renn, who was appointed" [p. 2]', SPANS, BOOK)[0]
    assert (good.verified, good.quote) == (True, "harbour master is Tobias Renn, who was appointed")
    assert places('It says "Tobias Renn was dismissed in anger" [p. 2]') == [("2", "text", False)]
    assert places('It says "the moon is made of cheese" [p. 2]') == [("2", "model", False)]


@pytest.mark.parametrize("make", [list, np.asarray, lambda values: torch.tensor(values, dtype=torch.bfloat16)])
def test_attention_finds_pages_clearly_above_the_median(make):
    scores = [9.0] * 5 + [1.0] * 10 + [1.0] * 10 + [4.0] * 10 + [1.1] * 10 + [50.0]
    assert places("Unrelated words", make(scores)) == [("2", "attention", False)]


def test_attention_is_per_token_and_flat_scores_name_nobody():
    long_page = [PageSpan(0, 1, "i", 0, 1000), *(PageSpan(0, n, "x", 1000 + n, 1001 + n) for n in (2, 3, 4))]
    assert cite_pages("Unrelated", long_page, BOOK, [1.0] * 1010) == ()
    assert places("Unrelated", [float("nan")] * 45) == []
    assert places("Unrelated", []) == []


def test_the_strongest_origin_wins():
    scores = [0.0] * 25 + [4.0] * 10 + [0.0] * 10
    answer = "The harbour master is Tobias Renn"
    assert places(answer, scores) == [("2", "text", True)]
    assert places(answer + " [p. 2].", scores) == [("2", "model", True)]
    assert places("Cheese [p. 2].", scores) == [("2", "attention", False)]


def test_files_are_told_apart():
    other = Document.from_pages(["Nothing here.", "Tobias Renn keeps bees."], "other.pdf")
    spans = [*SPANS, PageSpan(1, 1, "1", 45, 55), PageSpan(1, 2, "2", 55, 65)]
    found = cite_pages("Tobias Renn keeps bees [other.pdf p. 2].", spans, [BOOK, other])
    assert [(c.document, c.document_name, c.label, c.origin) for c in found] == [(1, "other.pdf", "2", "model")]


def test_files_of_one_name_are_told_apart_by_the_names_in_the_prompt():
    facts = ["The rent is 100 euros.", "The rent is 2,200 pounds.", "The rent is 33,000 yen."]
    names = ["invoice.pdf", "Invoice.pdf", "invoice.pdf (2)"]
    documents = [Document.from_pages([fact], name) for fact, name in zip(facts, names, strict=True)]
    expected = ("invoice.pdf", "Invoice.pdf (2)", "invoice.pdf (2) (2)")
    assert document_names(documents) == expected
    spans = [PageSpan(at, 1, "1", 10 * at, 10 * at + 10) for at in range(3)]
    for fact, name, at in zip(facts, expected, range(3), strict=True):
        for answer in (fact, f"{fact} [{name} p. 1]"):
            (citation,) = cite_pages(answer, spans, documents)
            assert (citation.document, citation.document_name, citation.verified) == (at, name, True)


def test_names_of_documents_are_distinct_and_stay_when_more_are_appended():
    def called(*names):
        return document_names([Document.from_pages(["x"], name) for name in names])

    assert called("[bold] a.pdf") == ("[bold] a.pdf",)
    assert called("[a].pdf", "(a).pdf", "b\n.pdf") == ("(a).pdf", "(a).pdf (2)", "b .pdf")
    many = called(*["a"] * 4, "a (2)", "x" * 100, "x" * 99)
    assert len({name.casefold() for name in many}) == 7
    assert many[:3] == called("a", "a", "a") == ("a", "a (2)", "a (3)")


def test_one_page_alone_can_be_cited():
    document = Document.from_text("The emergency channel is channel 12.")
    (citation,) = cite_pages("Channel 12.", [PageSpan(0, 1, "1", 0, 9)], document)
    assert citation.verified
    assert cite_pages("Paris is in France.", [PageSpan(0, 1, "1", 0, 9)], document) == ()


def test_scripts_without_spaces():
    document = Document.from_pages(["灯台の高さは四十一メートルです。", "港の水深は六メートルです。"], "jp")
    spans = [PageSpan(0, 1, "1", 0, 9), PageSpan(0, 2, "2", 9, 18)]
    assert [c.page for c in cite_pages("灯台の高さは四十一メートルです。", spans, document)] == [1]


def verdict(page: str, answer: str, question: str = "") -> list[bool]:
    document = Document.from_text(page)
    return [c.verified for c in cite_pages(answer, [PageSpan(0, 1, "1", 0, 9)], document, question=question)]


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("水箱容量为7400升。塔高36米。", "水箱容量为7400升。", "水箱容量为36升。"),
        ("水箱容量为７４００升，塔高３６米。", "水箱容量为7400升。", "水箱容量为9升。"),
        ("The tank holds 7400 litres. The tower is 36 m high.", "The tank holds 7,400 litres.", "Tank: 36 litres."),
        ("टंकी में 7400 लीटर है। मीनार 36 मीटर है।", "टंकी में ७४०० लीटर है।", "टंकी में 36 लीटर है।"),
        ("سعة الخزان ٧٤٠٠ لتر؟ ارتفاع البرج ٣٦ مترا.", "سعة الخزان 7400 لتر", "سعة الخزان 36 لتر"),
        ("Բաքը պարունակում է 7400 լիտր։ Աշտարակը 36 մետր է։", "Բաքը պարունակում է 7400 լիտր", "Բաքը 36 լիտր"),
        ("Tank capacity 7400 l\nTower height 36 m\nMast 12 m", "Tank capacity: 7400 l", "Tank capacity: 36 l"),
        ("灯台の高さは四十一メートルです。", "灯台の高さは四十一メートルです。", "灯台の高さは四十二メートルです。"),
        ("The emergency channel is 12. The tower is 36 m high.", "The channel is 12.", "The channel is 36."),
        ("Renn is harbour master. He was made it in 2016.", "Renn was made harbour master in 2016.", "Renn: 2015."),
    ],
)  # fmt: skip
def test_a_number_is_verified_where_its_words_stand(page, right, wrong):
    assert verdict(page, right) == [True]
    assert True not in verdict(page, wrong)


def test_without_any_sentence_end_a_window_of_words_decides():
    filler = " ".join(f"beacon{chr(97 + n)}" for n in range(26))
    page = f"tank capacity 7400 litres {filler} {filler.upper()} tower height 36 metres"
    assert verdict(page, "tank capacity 7400 litres") == [True]
    assert True not in verdict(page, "tank capacity 36 litres")
    thai = "ถังเก็บน้ำมีความจุ 7400 ลิตร " + "ประภาคารตั้งอยู่บนเกาะทางเหนือของอ่าว" * 4 + " หอสูง 36 เมตร"
    assert verdict(thai, "ถังเก็บน้ำมีความจุ 7400 ลิตร") == [True]
    assert True not in verdict(thai, "ถังเก็บน้ำมีความจุ 36 ลิตร")


def test_a_bare_number_is_checked_with_the_question():
    page = "The tank has a capacity of 7400 litres. The tower is 36 metres high."
    assert verdict(page, "7400.", "What capacity in litres has the tank?") == [True]
    assert True not in verdict(page, "36.", "What capacity in litres has the tank?")


@pytest.mark.parametrize(
    ("page", "answer"),
    [
        ("La ge\u0301rante s'appelle The\u0301re\u0300se Be\u0301gue\u0301.", "Gérante : Thérèse Bégué"),
        ("كِتَابُ المِينَاءِ قَدِيمٌ", "كتاب الميناء قديم"),
        ("סֵפֶר הַנָּמֵל יָשָׁן", "ספר הנמל ישן"),
        ("Ο ΦΆΡΟΣ ΆΝΑΨΕ", "ο φαρος αναψε"),
        ("बंदरगाह का मुखिया", "बंदरगाह का मुखिया"),
    ],
)
def test_marks_do_not_hide_a_page(page, answer):
    assert verdict(page, answer) == [True]


def test_quotations_in_other_quotation_marks():
    assert verdict("港の長はレンである。", "「港の長はレンである」と書いてある") == [True]
    assert True not in verdict("港の長はレンである。", "「港の長はブレッケである」と書いてある")


SAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lighthouse.pdf"


def test_the_sample_answers_its_own_questions():
    document = Document.from_pdf(SAMPLE)
    assert SAMPLE.stat().st_size < 100_000
    assert [page.label for page in document.pages] == ["i", "1", "2", "3", "4", "5", "6", "7"]
    assert document.warnings == ()
    spans = [PageSpan(0, page.number, page.label, page.number, page.number + 1) for page in document.pages]
    for answer, label in [
        ("The emergency channel of the harbour office is channel 12.", "3"),
        ("The harbour master is Tobias Renn.", "6"),
        ("The main fuel tank holds 7,400 litres.", "5"),
        ("The tower was lit for the first time on 9 November 1874.", "i"),
    ]:
        found = cite_pages(answer, spans, document)
        assert [(citation.label, citation.verified) for citation in found] == [(label, True)]
