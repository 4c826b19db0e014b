"""The collection of real and hostile PDFs beside the repository, where there is one."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest

from tests.documents.cpu_time import cpu_seconds
from tidekv_llm.documents import Document, PdfLimits
from tidekv_llm.errors import DocumentError, EncryptedDocumentError, NoTextError, TideKVError

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "pdfs"
GIVE = FOLDER / "give"

pytestmark = pytest.mark.skipif(not (FOLDER / "MANIFEST.tsv").exists(), reason="no shared PDF collection here")


def read(number: int, **options) -> Document:
    (path,) = GIVE.glob(f"{number:02d}_*.pdf")
    return Document.from_pdf(path, **options)


@pytest.mark.parametrize(
    ("number", "pages", "fragment"),
    [
        (1, 4, "Contents"),
        (2, 1, "pdf encryption test"),
        (5, 6, "and dangerous for use"),
        (6, 3, "adipiscing"),
        (7, 1, "abcdeffffiflffiffl"),
        (8, 1, "حَبيبي habibi حَبيبي"),
        (9, 1, "Hello ASCII\n日本語テスト"),
        (11, 1, "Reduced test-case"),
        (13, 2, "This is my first page"),
        (14, 1, "First Name: Alice\nFirst Name_2: Bob"),
        (16, 1, "Lorem ipsum"),
    ],
)
def test_text_is_right(number, pages, fragment):
    document = read(number)
    assert len(document.pages) == pages
    assert fragment in document.text
    assert "  " not in document.text


def test_password_of_the_locked_file():
    with pytest.raises(EncryptedDocumentError, match="give its password"):
        read(3)
    with pytest.raises(EncryptedDocumentError, match="wrong password"):
        read(3, password="wrong")
    assert "Lorem ipsum" in read(3, password="openpassword").text


def test_the_fax_is_a_scan():
    with pytest.raises(NoTextError, match=r"page 1 has no text layer \(scan\?\)"):
        read(4)


def test_mojibake_is_left_out_or_read_by_the_other_engine():
    document = read(10)
    assert "あいうえお" in document.text or any("may be unreadable" in warning for warning in document.warnings)
    assert "\u034b" not in document.text


def test_the_cyclic_tree_is_refused_at_once():
    def refused() -> None:
        with pytest.raises(DocumentError, match="cyclic"):
            read(12)

    assert cpu_seconds(refused) < 10 * cpu_seconds(lambda: read(16))  # an ordinary file


def test_xfa_and_attachments_are_warned_of():
    assert any("placeholder" in warning for warning in read(15).warnings)
    assert "1 attachment (image.png) ignored" in read(16).warnings


def test_the_long_book_is_whole_and_clean():
    document = read(17)
    assert len(document.pages) == 117
    assert 125_000 < len(document.text) < 145_000
    assert not set("\0\ufb00\ufb01\ufb02\ufb03\ufb04") & set(document.text)


def told(path: Path, said: list[str]) -> None:
    """Read it, and note what was said about it if it cannot be read."""
    try:
        Document.from_pdf(path)
    except TideKVError as error:
        said.append(str(error))


def test_hostile_files_are_text_or_one_line(tmp_path):
    spec = importlib.util.spec_from_file_location("hostile", FOLDER / "hostile.py")
    hostile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hostile)
    ordinary = cpu_seconds(lambda: read(16))
    for name, make in hostile.S.items():
        path = tmp_path / name
        path.write_bytes(make())
        said: list[str] = []
        assert cpu_seconds(functools.partial(told, path, said)) < PdfLimits().page_seconds + 40 * ordinary, name
        assert "\n" not in "".join(said), name
