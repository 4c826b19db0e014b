"""Progress of loading is ours alone: the bars that libraries draw on standard error are held back meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from typing import Any

Progress = Callable[[str, float], None]
"""Called with a message and the fraction done, 0.0 to 1.0."""

_lock = threading.Lock()
_loading: dict[int, Progress | None] = {}  # by thread
_held_back = ExitStack()


@contextmanager
def only_our_progress(report: Progress | None) -> Iterator[None]:
    """Hold back foreign bars in this thread; the tensors of a GGUF file are told to ``report``.

    What the libraries draw for other threads, and the caller's own settings, stay as they were.
    """
    thread = threading.get_ident()
    with _lock:
        if not _loading:
            _hold_back()
        _loading[thread] = report
    try:
        yield
    finally:
        with _lock:
            del _loading[thread]
            if not _loading:
                _held_back.close()


def _hold_back() -> None:
    """Transformers has a switch for most of its bars, and draws the one of GGUF files past it."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    if logging.is_progress_bar_enabled():
        logging.disable_progress_bar()
        _held_back.callback(logging.enable_progress_bar)
    draw = getattr(gguf_reader, "tqdm", None)
    if draw is not None:
        gguf_reader.tqdm = _told_instead_of(draw)
        _held_back.callback(setattr, gguf_reader, "tqdm", draw)


def _told_instead_of(draw: Callable[..., Any]) -> Callable[..., Any]:
    def bar(tensors: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() not in _loading:
            return draw(tensors, *arguments, **options)
        return _told(tensors, _loading[threading.get_ident()])

    return bar


def _told(tensors: Iterable[Any], report: Progress | None) -> Iterator[Any]:
    total = len(tensors) if isinstance(tensors, Sized) else 0
    for done, tensor in enumerate(tensors, start=1):
        yield tensor
        if report is not None and total:
            report(f"unpacking tensor {done} of {total}", done / total)
