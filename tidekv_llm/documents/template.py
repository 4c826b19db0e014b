"""The chat template: what it makes of a conversation, and where it puts the text that it is given.

The template sees random marks instead of text, and the text is put where the marks come out: so it can neither be
mistaken for the template's own nor change it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tidekv_llm.documents.tokens import control_ids, control_tokens, plain_ids, template_ids
from tidekv_llm.errors import ConfigError, one_line, reason

TemplateKwargs = Mapping[str, Any]
"""Values for names that a chat template knows besides the messages (``enable_thinking``, ``reasoning_effort``)."""

# Reasoning is off unless it is asked for: it would use up a short answer's tokens before the answer begins.
_DEFAULTS = {"enable_thinking": False}
_OURS = ("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
         "chat_template", "return_tensors", "padding", "truncation", "max_length", "tokenizer_kwargs")  # fmt: skip


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

    @property
    def text(self) -> str:
        """What is said in it."""
        return "".join(part.text for part in self.parts)


class TurnEnd(NamedTuple):
    """What ends an assistant's turn.

    Attributes:
        token_id: a control token, or None.
        text: where there is none, what the next turn begins with; empty if there is nothing to tell it by.
    """

    token_id: int | None = None
    text: str = ""


def has_chat_template(tokenizer: Any) -> bool:
    """Whether messages can be rendered at all."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_template_kwargs(kwargs: TemplateKwargs | None) -> dict[str, Any]:
    """Values for a template's names, with our defaults.

    Raises:
        ConfigError: no mapping of names, or a name that is not the template's.
    """
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ConfigError(f"chat_template_kwargs={kwargs!r} must be a dict of names, {{'enable_thinking': False}} say")
    for name in kwargs or ():
        if name in _OURS:
            raise ConfigError(f"chat_template_kwargs may not set {name!r}, which is no name of the template")
    return {**_DEFAULTS, **(kwargs or {})}


def encode(tokenizer: Any, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of pieces, each encoded on its own: so a piece's range is exact, whatever stands next to it."""
    return [
        token
        for piece in pieces
        for token in (template_ids if piece.kind == "template" else plain_ids)(tokenizer, piece.text)
    ]


def encode_chat(tokenizer: Any, messages: Sequence[Message], kwargs: TemplateKwargs | None = None) -> list[int]:
    """Token ids of a conversation: the template's own of the real text, unless the text spells a control token."""
    used, pieces, bos = _rendered(tokenizer, messages, check_template_kwargs(kwargs))
    own = [token for piece in pieces if piece.kind == "template" for token in template_ids(tokenizer, piece.text)]
    try:
        conversation = [{"role": message.role, "content": message.text} for message in used]
        whole = template_ids(tokenizer, _apply(tokenizer, conversation, check_template_kwargs(kwargs)))
    except Exception:  # text that the template cannot take is put in beside it
        return [*bos, *encode(tokenizer, pieces)]
    safe = control_ids(tokenizer, whole) == control_ids(tokenizer, own)
    return [*bos, *(whole if safe else encode(tokenizer, pieces))]


def render(
    tokenizer: Any, messages: Sequence[Message], kwargs: TemplateKwargs | None = None
) -> tuple[list[Piece], tuple[int, ...]]:
    """Pieces in order, and the BOS ids that belong before them.

    Raises:
        ConfigError: the template does not take these messages; the message says what it said.
    """
    _, pieces, bos = _rendered(tokenizer, messages, check_template_kwargs(kwargs))
    return pieces, bos


def turn_end(tokenizer: Any) -> TurnEnd:
    """What a chat template puts between an assistant's turn and the next one; nothing where it cannot be told."""
    said = [Message(role, (Piece("plain", role),)) for role in ("user", "assistant", "user")]
    if not has_chat_template(tokenizer):
        return TurnEnd()
    try:
        pieces, _ = render(tokenizer, said)
    except ConfigError:
        return TurnEnd()
    between = pieces[4].text  # template, user, template, assistant, and then
    spelled = [
        (place, token) for token, text in control_tokens(tokenizer).items() if (place := between.find(text)) >= 0
    ]
    place, token = min(spelled, default=(len(between), None))
    if token is not None and not between[:place].strip():
        return TurnEnd(token)
    text = between[:place].rstrip()
    return TurnEnd(None, text if len(text.strip()) > 2 else "")


def _rendered(
    tokenizer: Any, messages: Sequence[Message], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Message], list[Piece], tuple[int, ...]]:
    """The messages as the template takes them, their pieces, and the BOS ids."""
    try:
        pieces = _render_once(tokenizer, messages, kwargs)
    except _Refused as refused:
        if messages[0].role != "system" or not refused.by_template:
            raise ConfigError(str(refused)) from refused
        messages = _system_into_user(messages)
        try:
            pieces = _render_once(tokenizer, messages, kwargs)
        except _Refused as again:
            raise ConfigError(str(again)) from again
    return messages, pieces, _missing_bos(tokenizer, pieces[0])


class _Refused(Exception):
    """The template does not take the conversation.

    Args:
        message: what it said.
        by_template: whether it is the template's own word, which another order of messages may change.
    """

    def __init__(self, message: str, *, by_template: bool = True) -> None:
        super().__init__(message)
        self.by_template = by_template


def _apply(tokenizer: Any, conversation: list[dict[str, str]], kwargs: Mapping[str, Any]) -> str:
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **kwargs)
    assert isinstance(rendered, str)
    return rendered


def _render_once(tokenizer: Any, messages: Sequence[Message], kwargs: Mapping[str, Any]) -> list[Piece]:
    """Raises :class:`_Refused` when the template refuses, or drops, changes or repeats a message."""
    marks = [f"mark{secrets.token_hex(16)}" for _ in messages]
    spaces = [_spaces(message) for message in messages]
    conversation = [
        {"role": message.role, "content": f"{before}{mark}{after}"}
        for message, mark, (before, after) in zip(messages, marks, spaces, strict=True)
    ]
    try:
        rendered = _apply(tokenizer, conversation, kwargs)
    except Exception as error:  # templates raise jinja2's errors, and Python's
        raise _refusal(error, "tools" in str(getattr(tokenizer, "chat_template", ""))) from error
    pieces: list[Piece] = []
    for number, (message, mark, space) in enumerate(zip(messages, marks, spaces, strict=True)):
        before, found, rendered = rendered.partition(mark)
        if not found or mark in rendered:
            raise _Refused(
                f"the chat template drops, repeats or moves messages[{number}], of role {message.role!r}; "
                "leave it out or say it in another role"
            )
        before, rendered, parts = _placed(message.parts, before, rendered, space)
        pieces += [Piece("template", before), *parts]
    return [*pieces, Piece("template", rendered)]


def _spaces(message: Message) -> tuple[str, str]:
    """White space around a message's text: the template sees it, for many trim it."""
    first, last = message.parts[0].text if message.parts else "", message.parts[-1].text if message.parts else ""
    if DOCUMENT in message.parts or not message.text.strip():  # around the pages nothing is to be trimmed
        return "", ""
    return first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]


def _placed(
    parts: tuple[Piece, ...], before: str, after: str, space: tuple[str, str]
) -> tuple[str, str, tuple[Piece, ...]]:
    """The parts where their mark stood: with the white space that came through beside it, without what was trimmed."""
    leading, trailing = space
    chosen = list(parts)
    if leading:
        came = before.endswith(leading)
        before = before[: -len(leading)] if came else before
        chosen[0] = chosen[0] if came else Piece(chosen[0].kind, chosen[0].text.lstrip())
    if trailing:
        came = after.startswith(trailing)
        after = after[len(trailing) :] if came else after
        chosen[-1] = chosen[-1] if came else Piece(chosen[-1].kind, chosen[-1].text.rstrip())
    return before, after, tuple(chosen)


def _refusal(error: Exception, knows_tools: bool) -> _Refused:
    """What a template's error is, in one line with a remedy."""
    from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

    said = one_line(str(error))
    if isinstance(error, TemplateSyntaxError):
        return _Refused(
            f"the chat template has a syntax error in line {error.lineno}: {said}; mend the tokenizer's template",
            by_template=False,
        )
    if knows_tools and "None" in said:
        return _Refused(
            f"the chat template wants tools ({said}), and none are given here; use one for chats without tools",
            by_template=False,
        )
    if isinstance(error, UndefinedError):
        return _Refused(
            f"the chat template uses a name that nobody gave: {said}; give it in chat_template_kwargs",
            by_template=False,
        )
    if isinstance(error, TemplateError):
        return _Refused(f"the chat template refuses this conversation: {said}; send messages that it takes")
    return _Refused(f"the chat template fails ({reason(error)}); mend the tokenizer's template", by_template=False)


def _system_into_user(messages: Sequence[Message]) -> list[Message]:
    """For templates without a system role: its text opens the first user turn."""
    system, *others = messages
    # A conversation that the assistant opens: the text is none of the greeting's.
    first = others.pop(0) if others and others[0].role == "user" else Message("user", ())
    gap = (Piece("plain", "\n\n"),) if first.parts else ()
    return [Message("user", (*system.parts, *gap, *first.parts)), *others]


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
