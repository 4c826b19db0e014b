"""What stands on a PDF page beside its text: filled form fields as the page shows them, and text annotations.

Runs in the PDF worker only; ``page``, ``widget`` and ``node`` are pypdf's dictionaries.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tidekv_llm.documents.cleanup import clean_text

Placed = tuple[float, float, str]
"""A piece of text and where it begins on the page, in points from the lower left."""

_MAX_NAME = 200
_MAX_PER_PAGE = 2000
_MAX_PARENTS = 32
_HIDDEN = 1 << 1  # an annotation's flag
_PASSWORD, _PUSH_BUTTON = 1 << 13, 1 << 16  # a field's flags
_CAPTION_GAP = 150.0  # points; a caption stands right of its button and near
_SPACES = re.compile(r"\s+")


def annotations_of(page: Any, *kinds: str) -> Iterator[Any]:
    """The page's annotations of these kinds; a broken one must not cost the page its text."""
    for index, reference in enumerate(page.get("/Annots") or ()):
        if index >= _MAX_PER_PAGE:
            return
        with contextlib.suppress(Exception):
            annotation = reference.get_object()
            if annotation.get("/Subtype") in kinds:
                yield annotation


def typed_notes(page: Any) -> list[str]:
    """Text that was typed onto the page as an annotation, and that every viewer shows as part of it."""
    notes = []
    for annotation in annotations_of(page, "/FreeText"):
        with contextlib.suppress(Exception):
            if not int(annotation.get("/F", 0)) & _HIDDEN:
                notes.append(clean_text(str(annotation.get("/Contents", ""))))
    return [note for note in notes if note]


def page_fields(page: Any, seen: set[str], placed: Sequence[Placed]) -> list[str]:
    """``name: value`` for each filled field with a widget on this page; ``seen`` collects the names."""
    lines: dict[str, None] = {}  # the boxes of a group of radio buttons are one field
    boxes = [_box(widget) for widget in annotations_of(page, "/Widget")]
    for widget in annotations_of(page, "/Widget"):
        with contextlib.suppress(Exception):
            name, found = _field(widget)
            value = _button(widget, found, boxes, placed) if found.get("/FT") == "/Btn" else _value(found)
            seen.add(name)
            if value:
                lines[f"{name}: {value}"] = None
    return list(lines)


def fields_without_page(form: Any, seen: set[str]) -> list[str]:
    """Filled fields that no page shows: they come with the last page rather than not at all."""
    lines: dict[str, None] = {}
    for node in _leaves(form.get("/Fields") or (), _MAX_PARENTS):
        with contextlib.suppress(Exception):
            name, found = _field(node)
            value = _value(found) if name not in seen else ""
            if value:
                lines[f"{name}: {value}"] = None
    return list(lines)


def _leaves(nodes: Any, depth: int) -> Iterator[Any]:
    for reference in nodes:
        with contextlib.suppress(Exception):
            node = reference.get_object()
            if "/Kids" in node and depth:
                yield from _leaves(node["/Kids"], depth - 1)
            else:
                yield node


def _field(widget: Any) -> tuple[str, dict[str, Any]]:
    """Full name of a field, and its type, flags, value and options, each of which may sit on a parent."""
    names: list[str] = []
    found: dict[str, Any] = {}
    node = widget
    for _ in range(_MAX_PARENTS):
        if "/T" in node:
            names.insert(0, str(node["/T"]))
        for key in ("/V", "/Ff", "/FT", "/Opt"):
            if key in node:
                found.setdefault(key, node[key].get_object() if hasattr(node[key], "get_object") else node[key])
        if "/Parent" not in node:
            break
        node = node["/Parent"].get_object()
    return _SPACES.sub(" ", clean_text(".".join(names)))[:_MAX_NAME] or "field", found


def _value(found: dict[str, Any]) -> str:
    if int(found.get("/Ff", 0)) & _PASSWORD and found.get("/FT") == "/Tx":
        return "(hidden)"
    return _shown(found.get("/V"), _options(found))


def _options(found: dict[str, Any]) -> dict[str, str]:
    """What the page shows for each value that is stored: ``{"46": "Germany"}``."""
    options: dict[str, str] = {}
    for number, option in enumerate(found.get("/Opt") or ()):
        pair = option if isinstance(option, list) else [option]
        options.setdefault(str(pair[0]), str(pair[-1]))
        if found.get("/FT") == "/Btn":  # a button's states are numbered, /0, /1, ...
            options.setdefault(str(number), str(pair[-1]))
    return options


def _shown(value: Any, options: dict[str, str]) -> str:
    if value is None or value == "/Off":
        return ""
    if hasattr(value, "get_data"):
        return clean_text(value.get_data().decode("utf-8", "replace"))
    if isinstance(value, list):
        return ", ".join(filter(None, (_shown(each, options) for each in value)))
    text = str(value).removeprefix("/") if type(value).__name__ == "NameObject" else str(value)
    return clean_text(options.get(text, text))


# --- buttons ---------------------------------------------------------------------------------------------------


def _button(widget: Any, found: dict[str, Any], boxes: Sequence[list[float]], placed: Sequence[Placed]) -> str:
    """The caption of a button that is on, by the form's own words or by what is printed beside it; else its state."""
    state = _state(widget, found)
    if int(found.get("/Ff", 0)) & _PUSH_BUTTON or not state:
        return ""
    named = _options(found).get(state)
    caption = named or str(widget.get("/TU", "")) or _caption(_box(widget), boxes, placed) or state
    return clean_text(_SPACES.sub(" ", caption))


def _state(widget: Any, found: dict[str, Any]) -> str:
    """The name of the state that this very button is in, or nothing when it is off."""
    if "/AS" in widget:
        state = str(widget["/AS"])
    else:
        states = widget.get("/AP", {}).get("/N", {})
        value = found.get("/V")
        state = str(value) if value is not None and (not states or value in states) else "/Off"
    return "" if state == "/Off" else state.removeprefix("/")


def _box(widget: Any) -> list[float]:
    """Left, bottom, right, top."""
    with contextlib.suppress(Exception):
        x1, y1, x2, y2 = (float(number) for number in widget["/Rect"])
        return [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)]
    return [0.0, 0.0, 0.0, 0.0]


def _caption(box: list[float], boxes: Sequence[list[float]], placed: Sequence[Placed]) -> str:
    """The text that begins right of the button, on its line, before the next button."""
    left, bottom, right, top = box
    end = min((x1 for x1, y1, _, y2 in boxes if x1 > left and y1 < top and y2 > bottom), default=right + _CAPTION_GAP)
    beside = [(x, text) for x, y, text in placed if right - 1 <= x < end and bottom - 3 <= y <= top]
    return min(beside)[1].strip().split("\n")[0] if beside else ""
