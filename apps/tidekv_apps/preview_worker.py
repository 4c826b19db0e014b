"""The child process that draws one PDF page, under limits.

Run as ``python -m tidekv_apps.preview_worker``: a JSON request on standard input, a JSON answer on standard output.
pypdfium2 has no limits of its own and the file is a stranger's, so it is never opened in the server's process.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from typing import Any

from tidekv_apps.quotes import find_quote
from tidekv_llm import sandbox

MAX_PIXELS = 2_000_000


def main() -> int:
    """Draw the page that the request names."""
    json.dump(_draw(sandbox.enter()), sys.stdout)
    return 0


def _draw(request: dict[str, Any]) -> dict[str, Any]:
    import pypdfium2

    with pypdfium2.PdfDocument(request["path"], password=request["password"]) as pdf:
        page = pdf[int(request["page"]) - 1]
        width, height = page.get_size()
        scale = min(int(request["width"]) / max(width, 1), (MAX_PIXELS / max(width * height, 1)) ** 0.5)
        image = page.render(scale=scale).to_pil().convert("RGB")
        boxes = _boxes(page, request["quote"], width, height) if request["quote"] else []
    out = io.BytesIO()
    image.save(out, "JPEG", quality=82, optimize=True)
    return {"jpeg": base64.b64encode(out.getvalue()).decode(), "boxes": boxes, "size": image.size}


def _boxes(page: Any, quote: str, width: float, height: float) -> list[list[float]]:
    """Rectangles around the quotation, as shares of the page: left, top, width, height."""
    text_page = page.get_textpage()
    found = find_quote(text_page.get_text_range(), quote)
    if found is None:
        return []
    start, stop = found
    boxes = []
    for at in range(text_page.count_rects(start, stop - start)):
        left, bottom, right, top = text_page.get_rect(at)
        boxes.append([left / width, 1 - top / height, (right - left) / width, (top - bottom) / height])
    return boxes


if __name__ == "__main__":
    sys.exit(main())
