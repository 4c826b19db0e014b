"""Gradio's file element without the empty file that it leaves for each uploaded one."""

from __future__ import annotations

from typing import Any

import gradio as gr

class Files(gr.File):
    """A place to drop files; its handler gets their paths."""

    is_template = True  # to the page it is a "file" like any other

    def preprocess(self, payload: Any) -> list[str] | None:  # type: ignore[override]
        """The paths, which the guard has already checked to be the caller's own uploads."""
        return None if payload is None else [file.path for file in payload]
    from typing import Callable, Literal, Sequence, Any, TYPE_CHECKING
    from gradio.blocks import Block
    if TYPE_CHECKING:
        from gradio.components import Timer
        from gradio.components.base import Component
