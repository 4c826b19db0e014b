"""The app with its slow parts watched: ``python -m tests.apps.watched NOTES '{"model": ...}'``.

Whatever takes as long as a document is long writes down whether it ran on a thread with a running event loop. That
is a fact and no time, so that a busy machine changes nothing.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.apps import serve

# These grow with an answer or an error, not with a document.
SMALL_TEMPLATES = ("head.html", "live.html", "notice.html", "no_figures.html")


class Watch:
    """Writes ``name`` and where it ran into a file, one line per call."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def note(self, name: str) -> None:
        where = "loop" if asyncio._get_running_loop() is not None else "thread"
        with self._notes.open("a") as out:
            out.write(f"{where} {name}\n")

    def put(
        self, owner: Any, name: str, label: str, before: Callable[..., object] = lambda *args, **named: None
    ) -> None:
        """Replace a function by one that notes each call."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def noted(*args: Any, **named: Any) -> Any:
            self.note(label)
            before(*args, **named)
            return inner(*args, **named)

        setattr(owner, name, noted)


def watch(notes: Path) -> None:
    """Watch everything of the app that takes longer for longer documents."""
    import jinja2
    from transformers import PreTrainedTokenizerBase

    from tidekv_apps import export, viewer
    from tidekv_apps.forecast import planner
    from tidekv_apps.visits import Visit
    from tidekv_llm.documents import Document

    seen = Watch(notes)
    # A slow tokenizer: on the event loop everybody would wait for it.
    seen.put(PreTrainedTokenizerBase, "__call__", "tokenizer", lambda *args, **named: time.sleep(0.06))
    seen.put(Document, "select", "select")
    seen.put(Visit, "tidy", "tidy")
    seen.put(Visit, "_sources", "sources")
    seen.put(hashlib, "file_digest", "file_digest")
    seen.put(export, "as_json", "as_json")
    seen.put(export, "as_markdown", "as_markdown")
    seen.put(export, "turn_as_dict", "turn_as_dict")
    seen.put(viewer, "find_quote", "find_quote")
    seen.put(planner, "require_memory", "require_memory")
    render = jinja2.Template.render

    def rendered(self: jinja2.Template, *args: Any, **named: Any) -> str:
        if self.name not in SMALL_TEMPLATES:
            seen.note(f"render {self.name}")
        return render(self, *args, **named)

    jinja2.Template.render = rendered  # type: ignore[method-assign]


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    serve.main(json.loads(sys.argv[2]))
