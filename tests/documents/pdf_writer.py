"""Writes small PDFs byte by byte, honest and hostile, so that the tests need no files and no PDF library."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise

Objects = dict[int, bytes]

FONT = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"


def assemble(objects: Objects, trailer: bytes = b"") -> bytes:
    """A file of numbered objects with a correct cross-reference table; object 1 is the catalog."""
    out, offsets = b"%PDF-1.7\n", {}
    for number, body in objects.items():
        offsets[number] = len(out)
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start, size = len(out), max(objects) + 1
    rows = [b"%010d 00000 n \n" % offsets[n] if n in offsets else b"0000000000 65535 f \n" for n in range(size)]
    table = b"xref\n0 %d\n%s" % (size, b"".join(rows))
    return out + table + b"trailer\n<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (size, trailer, start)


def stream(data: bytes, *, compress: bool = False, extra: bytes = b"") -> bytes:
    if compress:
        data, extra = zlib.compress(data, 9), extra + b"/Filter/FlateDecode"
    return b"<</Length %d%s>>stream\n%s\nendstream" % (len(data), extra, data)


def literal(text: str) -> bytes:
    """A PDF string literal in Latin-1."""
    raw = text.encode("latin-1").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")
    return b"(" + raw + b")"


def show(lines: Sequence[str]) -> bytes:
    """Content stream that prints lines from the top of the page."""
    return b"BT /F1 12 Tf 72 720 Td 14 TL " + b" ".join(literal(line) + b" Tj T*" for line in lines) + b" ET"


def page_object(contents: int, extra: bytes = b"") -> bytes:
    return b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R%s>>" % (
        contents,
        extra,
    )


def document(
    contents: Sequence[bytes], *, catalog: bytes = b"", page_extra: bytes = b"", more: Objects | None = None
) -> bytes:
    """One page per content-stream object (as made by ``stream``); page N is object 4+2(N-1)."""
    objects: Objects = {
        1: b"<</Type/Catalog/Pages 2 0 R%s>>" % catalog,
        2: b"<</Type/Pages/Count %d/Kids[%s]>>"
        % (len(contents), b" ".join(b"%d 0 R" % (4 + 2 * n) for n in range(len(contents)))),
        3: FONT,
    }
    for index, content in enumerate(contents):
        objects[4 + 2 * index] = page_object(5 + 2 * index, page_extra)
        objects[5 + 2 * index] = content
    return assemble({**objects, **(more or {})})


def text_pdf(*pages: Sequence[str], catalog: bytes = b"") -> bytes:
    """An honest PDF: one page per list of lines."""
    return document([stream(show(lines)) for lines in pages], catalog=catalog)


def cyclic_tree() -> bytes:
    """A page tree that is its own child."""
    return assemble({1: b"<</Type/Catalog/Pages 2 0 R>>", 2: b"<</Type/Pages/Count 1/Kids[2 0 R]>>", 3: FONT})


def shared_kids_tree(depth: int) -> bytes:
    """Each node lists the next one ten times: 10**depth pages in a few hundred bytes."""
    objects: Objects = {1: b"<</Type/Catalog/Pages 2 0 R>>", 3: FONT}
    nodes = [2, *range(4, 4 + depth)]
    for node, child in pairwise(nodes):
        objects[node] = b"<</Type/Pages/Count 10/Kids[%s]>>" % b" ".join([b"%d 0 R" % child] * 10)
    objects[nodes[-1]] = b"<</Type/Page/MediaBox[0 0 9 9]>>"
    return assemble(objects)


def giant_xref() -> bytes:
    """A cross-reference table that claims a thousand million entries."""
    body = text_pdf(["hello"])
    return body.replace(b"xref\n0 6", b"xref\n0 999999999").replace(b"/Size 6", b"/Size 999999999")


def deep_array(depth: int) -> bytes:
    """Arrays nested beyond any recursion limit, in the catalog."""
    return text_pdf(["deep"], catalog=b"/Deep " + b"[" * depth + b"]" * depth)


def unicode_pdf(*pages: Sequence[str]) -> bytes:
    """An honest PDF in any script: a font without glyphs whose ToUnicode map names every character."""
    codes = {char: code for code, char in enumerate(sorted({*"".join("".join(lines) for lines in pages)}), 1)}
    named = "\n".join(f"<{code:04x}> <{char.encode('utf-16-be').hex()}>" for char, code in codes.items())
    cmap = (
        f"1 begincodespacerange <0000> <ffff> endcodespacerange\n{len(codes)} beginbfchar\n{named}\nendbfchar\nendcmap"
    )
    shown = [
        b"BT /F1 12 Tf 72 720 Td 14 TL "
        + b" ".join(b"<%s> Tj T*" % "".join(f"{codes[char]:04x}" for char in line).encode() for line in lines)
        + b" ET"
        for lines in pages
    ]
    fonts: Objects = {
        3: b"<</Type/Font/Subtype/Type0/BaseFont/Any/Encoding/Identity-H/DescendantFonts[901 0 R]/ToUnicode 902 0 R>>",
        901: b"<</Type/Font/Subtype/CIDFontType2/BaseFont/Any/DW 600/CIDSystemInfo<</Ordering(Identity)>>>>",
        902: stream(cmap.encode()),
    }
    return document([stream(each) for each in shown], more=fonts)
