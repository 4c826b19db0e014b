"""A page that takes long is read, with progress and a way to stop; only what no reader can read is refused."""

from __future__ import annotations

import importlib.util

import pytest

from tests.documents import pdf_writer as write
from tidekv_llm.documents import Document, PdfLimits
from tidekv_llm.errors import Cancelled, DocumentError, NoTextError

STROKES = b"1 0 0 RG 10.5 20.25 m 30.1 40.2 l 50 60 70 80 90 100 c S\n"
TITLE = b"BT /F1 12 Tf 72 720 Td (Drawing 17, scale 1:50) Tj ET\n"


@pytest.fixture
def drawing(tmp_path):
    """A page whose one line of text stands before more strokes than pypdf reads in half a second."""
    path = tmp_path / "drawing.pdf"
    strokes = write.stream(TITLE + STROKES * 40_000, compress=True)
    path.write_bytes(write.document([strokes, write.stream(write.show(["next page"]))]))
    return path


@pytest.fixture
def no_other_reader(tmp_path, monkeypatch):
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "pypdfium2.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path / "stub")


@pytest.mark.usefixtures("no_other_reader")
def test_a_slow_page_gets_the_time_that_is_left(drawing):
    calls = []
    limits = PdfLimits(page_seconds=0.5)
    document = Document.from_pdf(drawing, limits=limits, progress=lambda *done: calls.append(done))
    assert document.text == "Drawing 17, scale 1:50\fnext page"
    assert document.warnings == ()
    assert calls == sorted(calls)
    assert calls[-1] == (2, 2)
    assert (1, 2) in calls  # the slow page is not counted before it is read


@pytest.mark.skipif(importlib.util.find_spec("pypdfium2") is None, reason="needs the extra preview")
def test_the_other_reader_reads_it_and_is_named(drawing):
    document = Document.from_pdf(drawing, limits=PdfLimits(page_seconds=0.5))
    assert document.text == "Drawing 17, scale 1:50\fnext page"
    assert document.warnings == ("page 1: read with pypdfium2, pypdf could not",)


@pytest.mark.usefixtures("no_other_reader")
def test_reading_can_be_stopped_while_a_page_takes_long(drawing):
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if done == 1 and len(calls) > 2:  # the second page is read, the first still is not
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        Document.from_pdf(drawing, limits=PdfLimits(page_seconds=0.3), progress=stop)
    assert 2 not in calls


@pytest.mark.usefixtures("no_other_reader")
def test_what_stays_unread_says_what_helps(tmp_path):
    path = tmp_path / "drawing.pdf"
    path.write_bytes(write.document([write.stream(TITLE + STROKES * 40_000, compress=True)]))
    with pytest.raises((NoTextError, DocumentError)) as caught:
        Document.from_pdf(path, limits=PdfLimits(page_seconds=0.3, cpu_seconds=2))
    assert "tidekv-llm[preview]" in str(caught.value)
    assert "ocrmypdf" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"<!DOCTYPE html><html><body>Please log in</body></html>", "an HTML page"),
        (b"\xef\xbb\xbf\n  <html lang='de'>Anmelden", "an HTML page"),
        (b"<?xml version='1.0'?><error code='403'/>", "XML"),
        (b'{"error": "token expired"}', "JSON"),
        (b"PK\x03\x04\x14\0\x06\0", "a ZIP archive or an office document"),
        (b"\x89PNG\r\n\x1a\n\0\0", "a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0", "an old office document"),
        (b"{\\rtf1\\ansi hello}", "RTF"),
        (b"%!PS-Adobe-3.0\n", "PostScript"),
        (b"# plain text", "text"),
        (bytes(range(200, 256)) * 3, "no known kind of file"),
    ],
)
def test_a_pdf_in_name_only_is_named_as_what_it_is(tmp_path, data, what):
    path = tmp_path / "Invoice.PDF"
    path.write_bytes(data)
    for read in (Document.from_file, Document.from_pdf):
        with pytest.raises(DocumentError, match=r"Invoice\.PDF is not a PDF") as caught:
            read(path)
        assert f"it holds {what}" in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.fixture
def many_pages(tmp_path):
    """A file whose list of pages alone takes longer than a hundredth of a second."""
    path = tmp_path / "many.pdf"
    path.write_bytes(write.document([write.stream(write.show([f"page {number}"])) for number in range(1, 1501)]))
    return path


@pytest.mark.usefixtures("no_other_reader")
def test_a_file_that_opens_slowly_gets_the_time_that_is_left(many_pages):
    document = Document.from_pdf(many_pages, pages="1,1500", limits=PdfLimits(page_seconds=0.01))
    assert document.text == "page 1\fpage 1500"


@pytest.mark.skipif(importlib.util.find_spec("pypdfium2") is None, reason="needs the extra preview")
def test_the_other_reader_opens_it_and_is_named(many_pages):
    document = Document.from_pdf(many_pages, pages="1,1500", limits=PdfLimits(page_seconds=0.01))
    assert document.text == "page 1\fpage 1500"
    assert any("pypdfium2" in warning for warning in document.warnings)
