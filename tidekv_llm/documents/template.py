"""The chat template: where it puts what it is given.

The template sees random marks instead of text, and the text is put where the marks come out: so it can neither be
mistaken for the template's own nor change it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tidekv_llm.documents.tokens import plain_ids, template_ids
from tidekv_llm.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """A stretch of the prompt.

    ``template`` text may hold special tokens, ``plain`` text may not; ``document`` is the place of the pages.
    """

    kind: Literal["template", "plain", "document"]
    text: str = ""


DOCUMENT = Piece("document")


@dataclass(frozen=True)
class Message:
    """A turn; its parts follow one another."""

    role: str
    parts: tuple[Piece, ...]


def encode(tokenizer: Any, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of pieces, each encoded on its own: so a piece's range is exact, whatever stands next to it."""
    return [
        token
        for piece in pieces
        for token in (template_ids if piece.kind == "template" else plain_ids)(tokenizer, piece.text)
    ]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether messages can be rendered at all."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[Piece], tuple[int, ...]]:
    """Pieces in order, and the BOS ids that belong before them.

    Raises:
        ConfigError: the template does not take these messages.
    """
    pieces = _render_once(tokenizer, messages)
    if pieces is None and messages[0].role == "system":
        pieces = _render_once(tokenizer, _system_into_user(messages))
    if pieces is None:
        raise ConfigError(
            "the chat template rejects this conversation; start with user and alternate user and assistant"
        )
    return pieces, _missing_bos(tokenizer, pieces[0])


def _render_once(tokenizer: Any, messages: Sequence[Message]) -> list[Piece] | None:
    """None when the template refuses the roles or drops, changes or repeats a message."""
    marks = [f"mark{secrets.token_hex(16)}" for _ in messages]
    conversation = [{"role": m.role, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    try:
        rendered = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
    except Exception:  # templates raise jinja2 errors of many kinds, which this file need not know
        return None
    if not isinstance(rendered, str) or any(rendered.count(mark) != 1 for mark in marks):
        return None
    pieces: list[Piece] = []
    for message, mark in zip(messages, marks, strict=True):
        before, found, rendered = rendered.partition(mark)
        if not found:  # the template reorders messages
            return None
        pieces += [Piece("template", before), *message.parts]
    return [*pieces, Piece("template", rendered)]


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    """For templates without a system role: its text opens the first user turn."""
    system, first, *others = messages if len(messages) > 1 else (messages[0], Message("user", ()))
    gap = (Piece("plain", "\n\n"),) if first.parts else ()
    return [Message(first.role, (*system.parts, *gap, *first.parts)), *others]


def default_bos(tokenizer: Any) -> tuple[int, ...]:
    """The BOS id in a tuple when this tokenizer puts one before every text, else nothing."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ()
    return (bos,) if list(tokenizer("a", verbose=False)["input_ids"])[:1] == [bos] else ()


def _missing_bos(tokenizer: Any, first: Piece) -> tuple[int, ...]:
    """The BOS that the template left out. Most templates spell it, and a second one hurts the model."""
    bos = default_bos(tokenizer)
    return () if bos and tuple(template_ids(tokenizer, first.text)[:1]) == bos else bos
