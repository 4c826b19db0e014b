"""What a file is by its first bytes: a PDF, or what the message that refuses it calls it."""

from __future__ import annotations

PDF_MAGIC = b"%PDF-"
MAGIC_WINDOW = 1024
"""Viewers accept leading junk before the header, up to this many bytes."""

_SIGNATURES = (
    (b"<!doctype html", "an HTML page (a login page?)"),
    (b"<html", "an HTML page (a login page?)"),
    (b"<head", "an HTML page (a login page?)"),
    (b"<?xml", "XML"),
    (b"{\\rtf", "RTF"),
    (b"{", "JSON"),
    (b"pk\x03\x04", "a ZIP archive or an office document"),
    (b"\xd0\xcf\x11\xe0", "an old office document"),
    (b"\x89png", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"gif8", "a GIF image"),
    (b"ii*\0", "a TIFF image"),
    (b"mm\0*", "a TIFF image"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"%!ps", "PostScript"),
)


def passes_for_pdf(head: bytes, name: str) -> bool:
    """Whether a file must be read as a PDF or not at all: its header opens a line, or its name says ``.pdf``.

    A text that merely mentions %PDF- is text.
    """
    before, found, _ = head.partition(PDF_MAGIC)
    opens_a_line = bool(found) and (before.strip(b"\xef\xbb\xbf \t\r\n\0") == b"" or b"\0" in before)
    return opens_a_line or name.lower().endswith(".pdf")


def kind_of(head: bytes) -> str:
    """What the first bytes of a file say that it is, with an article: ``an HTML page (a login page?)``."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    known = next((kind for signature, kind in _SIGNATURES if start.startswith(signature)), None)
    if known is not None:
        return known
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # the head may end within a character
            return "no known kind of file"
    return "no known kind of file" if b"\0" in head else "text"
