"""A page as a picture with the quotation marked, drawn in a child process; needs the extra ``preview``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
    request = {
        "path": str(path),
        "page": page,
        "quote": quote or "",
        "password": password,
        "width": WIDTH,
        "memory_bytes": MEMORY_BYTES,
        "cpu_seconds": SECONDS,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tidekv_apps.preview_worker"],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=SECONDS,
            env=_environment(),
            check=True,
        )
        answer = json.loads(done.stdout)
        boxes = tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in answer["boxes"])
        return PageImage(str(answer["jpeg"]), boxes)
    except (subprocess.SubprocessError, OSError, ValueError, KeyError, TypeError):
        return None


def _environment() -> dict[str, str]:
    """The same packages, and none of the server's secrets."""
    kept = ("PATH", "SYSTEMROOT", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "TEMP")
    root = str(Path(__file__).resolve().parents[1])
    search_path = [root, *(entry for entry in sys.path if entry and entry != root)]
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
