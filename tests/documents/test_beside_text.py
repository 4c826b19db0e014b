"""Form fields as the page shows them, text annotations, and text that is drawn more than once."""

from __future__ import annotations

import pytest

from tests.documents import pdf_writer as write
from tidekv_llm.documents import Document


def read(tmp_path, data: bytes) -> Document:
    path = tmp_path / "file.pdf"
    path.write_bytes(data)
    return Document.from_pdf(path)


def form(*widgets: bytes, lines: bytes = b"BT /F1 12 Tf 9 700 Td (Form) Tj ET", fields: bytes | None = None, **more):
    """A page with these widgets, objects 20, 21, ...; they are the fields of the form unless others are named."""
    numbers = b" ".join(b"%d 0 R" % (20 + at) for at in range(len(widgets)))
    return write.document(
        [write.stream(lines)],
        catalog=b"/AcroForm<</Fields[%s]>>" % (numbers if fields is None else fields),
        page_extra=b"/Annots[%s]" % numbers,
        more={**{20 + at: body for at, body in enumerate(widgets)}, **{int(k[1:]): v for k, v in more.items()}},
    )


def widget(body: bytes, box: bytes = b"0 0 9 9") -> bytes:
    return b"<</Type/Annot/Subtype/Widget/Rect[%s]%s>>" % (box, body)


@pytest.mark.parametrize(
    ("field", "line"),
    [
        (b"/FT/Ch/T(country)/V(46)/Opt[[(46)(Germany)][(47)(France)]]", "country: Germany"),
        (b"/FT/Ch/T(country)/V(Peru)/Opt[(Chile)(Peru)]", "country: Peru"),
        (b"/FT/Ch/T(colours)/V[(r)(b)]/Opt[[(r)(red)][(g)(green)][(b)(blue)]]", "colours: red, blue"),
        (b"/FT/Ch/T(other)/V(typed in)/Opt[[(a)(A)]]", "other: typed in"),
        (b"/FT/Btn/T(agree)/V/Yes/AS/Yes/TU(I agree to the rules)", "agree: I agree to the rules"),
        (b"/FT/Tx/T(name)/V(\xfe\xff\x00\x53\x00\x6f\x00\x66\x00\xed\x00\x61)", "name: Sofía"),
    ],
)
def test_a_field_reads_as_the_page_shows_it(tmp_path, field, line):
    assert read(tmp_path, form(widget(field))).text == f"Form\n\nForm fields:\n{line}"


def radio(state: bytes, box: bytes, on: bytes, extra: bytes = b"") -> bytes:
    return widget(b"/Parent 30 0 R/AS/%s/AP<</N<</%s 3 0 R/Off 3 0 R>>>>%s" % (on, state, extra), box)


@pytest.mark.parametrize(
    ("group", "extra", "caption"),
    [
        (b"/Opt[(single)(married)]", b"", "married"),
        (b"", b"/TU(Wedded)", "Wedded"),
        (b"", b"", "married"),  # what is printed beside the button
    ],
)
def test_a_radio_button_reads_as_its_caption(tmp_path, group, extra, caption):
    captions = (
        b"BT /F1 9 Tf 120 502 Td (single) Tj ET BT /F1 9 Tf 220 502 Td (married) Tj ET BT /F1 9 Tf 220 480 Td (x) Tj ET"
    )
    data = form(
        radio(b"0", b"100 500 110 510", b"Off"),
        radio(b"1", b"200 500 210 510", b"1", extra),
        lines=captions,
        fields=b"30 0 R",
        _30=b"<</FT/Btn/Ff 32768/T(state)/V/1/Kids[20 0 R 21 0 R]%s>>" % group,
    )
    assert read(tmp_path, data).text.endswith(f"Form fields:\nstate: {caption}")


def test_fields_with_numbered_names_are_fields_of_their_own(tmp_path):
    first, second = widget(b"/FT/Tx/T(phone)/V(11)"), b"<</FT/Tx/T(phone_2)/V(22)>>"
    data = form(
        first,
        fields=b"20 0 R 30 0 R 31 0 R",
        _30=second,
        _31=b"<</T(office)/Kids[32 0 R]>>",
        _32=b"<</FT/Tx/T(phone)/V(33)/Parent 31 0 R>>",
    )
    assert read(tmp_path, data).text.endswith("Form fields:\nphone: 11\nphone_2: 22\noffice.phone: 33")


def test_typed_annotations_are_text_and_comments_are_not(tmp_path):
    notes = (
        b"<</Type/Annot/Subtype/FreeText/Rect[0 0 9 9]/Contents(Paid on 3 May)>>",
        b"<</Type/Annot/Subtype/FreeText/F 2/Rect[0 0 9 9]/Contents(no reader sees this)>>",
        b"<</Type/Annot/Subtype/Text/Rect[0 0 9 9]/Contents(a comment)>>",
    )
    document = read(tmp_path, form(*notes, fields=b""))
    assert document.text == "Form\nPaid on 3 May"
    assert document.warnings == ("page 1: comments ignored",)
    scan = form(notes[0], lines=b"0 0 9 9 re f", fields=b"")
    assert read(tmp_path, scan).text == "Paid on 3 May"


T = b" (Total 7400 litres) Tj "
BOLD = {
    "a shifted matrix": b"BT /F1 12 Tf 1 0 0 1 72 700 Tm" + T + b"1 0 0 1 72.4 700 Tm" + T + b"ET",
    "two text objects": b"BT /F1 12 Tf 72 700 Td" + T + b"ET BT /F1 12 Tf 72 699.7 Td" + T + b"ET",
    "four strokes": b"BT /F1 12 Tf 72 700 Td " + (T + b".2 0 Td ") * 4 + b"ET",
    "arrays": b"BT /F1 12 Tf 72 700 Td [(Total )-20(7400 litres)] TJ .3 0 Td [(Total )-10(7400 litres)] TJ ET",
    "a moved page": b"q BT /F1 12 Tf 72 700 Td" + T + b"ET Q q 1 0 0 1 .5 0 cm BT /F1 12 Tf 72 700 Td" + T + b"ET Q",
}


@pytest.mark.parametrize("way", BOLD)
def test_text_drawn_twice_for_boldness_counts_once_and_is_said(tmp_path, way):
    document = read(tmp_path, write.document([write.stream(BOLD[way])]))
    assert document.text == "Total 7400 litres"
    assert document.warnings == ("page 1: text drawn twice in one place is counted once",)


@pytest.mark.parametrize(
    "drawn",
    [
        b"BT /F1 12 Tf 72 700 Td (7) Tj (7) Tj (7) Tj ET",  # one after another
        b"BT /F1 12 Tf 72 700 Td (7) Tj 9 0 Td (7) Tj 9 0 Td (7) Tj ET",  # a row of equal figures
        b"BT /F1 1 Tf 12 0 0 12 72 700 Tm (7) Tj .6 0 Td (7) Tj .6 0 Td (7) Tj ET",  # the matrix has the size
        b"BT /F1 12 Tf 72 700 Td (7) Tj 0 -14 Td (7) Tj 0 -14 Td (7) Tj ET",  # a column
    ],
)
def test_equal_text_in_other_places_stays(tmp_path, drawn):
    document = read(tmp_path, write.document([write.stream(drawn)]))
    assert "".join(document.text.split()) == "777"
    assert document.warnings == ()
