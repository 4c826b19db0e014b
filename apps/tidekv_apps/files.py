"""Gradio's file element without the empty file that it leaves for each uploaded one."""

from __future__ import annotations

from typing import Any

import gradio as gr


def file_drop(**options: Any) -> gr.File:
    """A place to drop files; its handler gets their paths.

    Not a subclass: Gradio writes a stub beside the source of every one.
    """
    made = gr.File(**options)
    made.preprocess = _paths  # type: ignore[method-assign]
    return made


def _paths(payload: Any) -> list[str] | None:
    """The paths, which the guard has already checked to be the caller's own uploads."""
    return None if payload is None else [file.path for file in payload]
