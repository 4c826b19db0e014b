"""A document in any script goes through PDF, prompt, ranking, citation and verification alike."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.documents.pdf_writer import unicode_pdf
from tests.text.corpus import CORPUS, Sample
from tidekv_llm.documents import Document, PageSpan, build_prompt, cite_pages
from tidekv_llm.documents.cleanup import clean_text, join_hyphens
from tidekv_llm.documents.ranking import bm25_order, ranked_pages
from tidekv_llm.documents.words import fold, normal, words

every_script = pytest.mark.parametrize("sample", CORPUS.values(), ids=CORPUS)
FILLER = ("The harbour office is open on Monday.", "Grey seals live on the skerries.", "港の事務所は月曜日に開く。")


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes as tokens: what the prompt holds can be read back."""
    alphabet = {char: code for code, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def drawn(sample: Sample, text: str) -> list[str]:
    """The lines as a PDF draws them: from left to right, figures too."""
    lines = text.split("\n")
    return [re.sub(r"\d+", lambda m: m[0][::-1], line[::-1]) for line in lines] if sample.right_to_left else lines


@pytest.fixture(scope="module")
def pdfs(tmp_path_factory):
    """Every sample's pages as read from its PDF."""
    folder = tmp_path_factory.mktemp("scripts")
    read = {}
    for at, (name, sample) in enumerate(CORPUS.items()):
        path = folder / f"{at}.pdf"
        path.write_bytes(unicode_pdf(*[drawn(sample, page) for page in sample.pages]))
        read[name] = Document.from_pdf(path)
    return read


@pytest.mark.parametrize("name", CORPUS)
def test_no_word_is_lost_or_welded_on_the_way_out_of_a_pdf(pdfs, name):
    document = pdfs[name]
    assert document.warnings == ()
    assert all(page.readable for page in document.pages)
    for page, source in zip(document.pages, CORPUS[name].pages, strict=True):
        assert sorted(words(page.text)) == sorted(words(source))


@every_script
def test_the_prompt_has_the_text_composed(tokenizer, sample):
    document = Document.from_pages([decomposed(page) for page in sample.pages], "sample")
    prompt = build_prompt(document, sample.question, tokenizer)
    for span, page in zip(prompt.spans, sample.pages, strict=True):
        assert normal(page) in tokenizer.decode(prompt.token_ids[span.start : span.stop])


@every_script
@pytest.mark.parametrize("form", [normal, decomposed])
def test_the_question_finds_its_page_among_others(sample, form):
    texts = [*FILLER, sample.keeper, sample.tank]
    assert bm25_order(form(sample.question), texts)[0] == len(texts) - 1
    assert bm25_order(sample.question, [form(text) for text in texts])[0] == len(texts) - 1


def test_the_best_of_pages_in_one_script_is_found():
    pages = [
        "合同自签字之日起生效。",
        "租金每月五日支付。",
        "押金为两个月租金。",
        "房屋由甲方维修。",
        "任何一方解除合同，通知期为三十天。",
    ]
    assert ranked_pages([Document.from_pages(pages, "lease")], "通知期是多久？")[0] == (0, 5)


@pytest.mark.parametrize("name", CORPUS)
def test_the_answer_is_cited_and_its_number_verified(pdfs, name):
    sample = CORPUS[name]
    for document in (pdfs[name], Document.from_pages([decomposed(page) for page in sample.pages], "sample")):
        spans = [PageSpan(0, number, str(number), 10 * number, 10 * number + 10) for number in (1, 2)]
        right = cite_pages(sample.right, spans, document, question=sample.question)
        assert [(citation.page, citation.verified) for citation in right] == [(2, True)]
        wrong = cite_pages(sample.wrong, spans, document, question=sample.question)
        assert not any(citation.verified for citation in wrong)


# --- what holds for any text ------------------------------------------------------------------------------------

TEXT = st.text(max_size=300) | st.lists(st.sampled_from([s for c in CORPUS.values() for s in c.pages])).map("\n".join)
WORD = st.sampled_from(sorted({word for c in CORPUS.values() for page in c.pages for word in re.findall(r"\w+", page)}))
LINES = st.lists(st.lists(WORD, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=5)


@given(TEXT)
def test_text_that_is_no_pdf_is_not_changed(text):
    document = Document.from_pages([text, "x"], "text")
    unseen = re.compile("[\ud800-\udfff\U000e0000-\U000e007f]")
    if not unseen.search(text):
        assert document.pages[0].text == unicodedata.normalize("NFC", text)


@given(TEXT)
def test_cleaning_and_folding_are_done_after_one_pass(text):
    assert clean_text(clean_text(text)) == clean_text(text)
    assert normal(normal(text)) == normal(text)
    assert fold(fold(text)) == fold(text)


@given(LINES, st.sampled_from([" ", "- ", " - ", "-", "\u2010 "]))
def test_nothing_is_welded_inside_a_line(lines, gap):
    text = "\n".join(line.replace(" ", gap) for line in lines)
    known = {spelled for line in lines for word in line.split() for spelled in (word, word.casefold())}
    (mended,) = join_hyphens([clean_text(text)])
    assert set(re.findall(r"[^\W\d_]+", mended)) <= set(re.findall(r"[^\W\d_]+", text)) | known


@settings(max_examples=15, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=3))
def test_no_word_of_a_pdf_is_lost(tmp_path_factory, pages):
    left_to_right = [[line for line in lines if line.isprintable() and not _turns(line)] for lines in pages]
    path = tmp_path_factory.mktemp("any") / "any.pdf"
    path.write_bytes(unicode_pdf(*[lines or ["x"] for lines in left_to_right]))
    document = Document.from_pdf(path)
    for page, lines in zip(document.pages, left_to_right, strict=True):
        assert sorted(words(page.text)) == sorted(words("\n".join(lines or ["x"])))


def _turns(line: str) -> bool:
    return any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in line)
