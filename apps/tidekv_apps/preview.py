"""A page as a picture with the quotation marked, drawn in a child process; needs the extra ``preview``."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from tidekv_llm import sandbox
from tidekv_llm.errors import DocumentError

MEMORY_BYTES = 1 << 30
SECONDS = 10
WIDTH = 900


@dataclass(frozen=True)
class PageImage:
    """A drawn page.

    Attributes:
        jpeg: base64.
        boxes: around the quotation, as shares of the page: left, top, width, height.
    """

    jpeg: str
    boxes: tuple[tuple[float, float, float, float], ...]


def can_draw() -> bool:
    """Whether pypdfium2 and Pillow are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("pypdfium2", "PIL"))


def draw_page(path: Path, page: int, *, quote: str | None = None, password: str | None = None) -> PageImage | None:
    """The page, or None where it cannot be drawn: the text is shown then."""
    if not can_draw() or path.open("rb").read(1024).find(b"%PDF-") < 0:
        return None
    request = {"path": str(path), "page": page, "quote": quote or "", "password": password, "width": WIDTH}
    try:
        drawn = sandbox.run("tidekv_apps.preview_worker", request, memory_bytes=MEMORY_BYTES, seconds=SECONDS)
        answer = json.loads(drawn or b"")
        boxes = tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in answer["boxes"])
        return PageImage(str(answer["jpeg"]), boxes)
    except (DocumentError, ValueError, KeyError, TypeError):
        return None
