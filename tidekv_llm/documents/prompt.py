"""Documents and a question become token ids, with the token range of every page.

The document always comes first and the question last, so that ``token_ids[:document_end]`` is the same for
every question: a session prefills it once. Text from documents and users is untrusted: special tokens spelled
in it are encoded as plain text, and only the chat template itself may open or close a turn.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tidekv_llm.documents.pages import Document, Page
from tidekv_llm.errors import ConfigError, ContextOverflowError, NoTextError

# Short on purpose: a second sentence made no difference to what SmolLM2-135M got right on the sample.
DEFAULT_INSTRUCTIONS = "Answer the question briefly, using the document."

HistoryTurn = tuple[str, str]
"""An earlier question and its answer."""


_CONTROL_SPELLING = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


@dataclass(frozen=True)
class PageSpan:
    """Where one page stands in the prompt.

    Args:
        document: index into the documents given to ``build_prompt``.
        page: 1-based physical page number.
        label: the label shown in the page's marker.
        start: first token index, at the page's marker.
        stop: token index after the page's last token.
    """

    document: int
    page: int
    label: str
    start: int
    stop: int


@dataclass(frozen=True)
class Prompt:
    """Token ids ready for prefill.

    Args:
        token_ids: the whole prompt.
        spans: token ranges of the pages, in prompt order.
        document_end: length of the prefix that no question or history can change.
        question: the question as asked.
        warnings: pages left out, and what the documents warn of.
    """

    token_ids: tuple[int, ...]
    spans: tuple[PageSpan, ...]
    document_end: int
    question: str
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


def build_prompt(
    documents: Document | Sequence[Document],
    question: str,
    tokenizer: Any,
    *,
    history: Sequence[HistoryTurn] = (),
    instructions: str = DEFAULT_INSTRUCTIONS,
    limit: int | None = None,
    answer_reserve: int = 0,
    unnamed: int | None = None,
) -> Prompt:
    """Lay out instructions, pages, history and question, in this order.

    Args:
        documents: one document or several; pages with a problem are left out and named in ``warnings``.
        question: what the user asks; it goes last.
        tokenizer: a Hugging Face tokenizer; its chat template is used when it has one.
        history: earlier (question, answer) pairs, oldest first.
        instructions: what the model should do with the document.
        limit: tokens the model can take; None for no check.
        answer_reserve: tokens to keep free for the answer, counted against ``limit``.
        unnamed: how many of the first documents have page markers without the file's name; by default one if it is
            alone, else none. A session that was opened with one document and has more appended keeps the first one's
            markers as they were.

    Raises:
        ConfigError: an empty question, no document, a negative reserve.
        NoTextError: no page can be read.
        ContextOverflowError: prompt and reserve exceed ``limit``; nothing is ever cut.
    """
    chosen = (documents,) if isinstance(documents, Document) else tuple(documents)
    turns = _check_request(chosen, question, history, answer_reserve)
    pieces, bos = _layout(tokenizer, turns, instructions.strip())
    at = next(index for index, piece in enumerate(pieces) if piece.kind == "document")
    builder = _Builder(tokenizer, bos)
    builder.add_pieces(pieces[:at])
    unnamed = int(len(chosen) == 1) if unnamed is None else unnamed
    for index, page in _readable_pages(chosen):
        builder.add_page(index, page, _page_text(chosen, index, page, named=index >= unnamed))
    document_end = len(builder.ids)
    builder.add_pieces(pieces[at + 1 :])
    _check_limit(len(builder.ids), answer_reserve, limit)
    return Prompt(tuple(builder.ids), tuple(builder.spans), document_end, question, _warnings(chosen))


def document_ends(prompt: Prompt) -> tuple[int, ...]:
    """Where each document ends in the prompt, ascending: the last is ``document_end``.

    Prefills cut their chunks there, so that a document that is appended later leaves the earlier ones as they were.
    """
    ends = {span.document: span.stop for span in prompt.spans}
    return tuple(sorted({*ends.values(), prompt.document_end}))


def count_document_tokens(document: Document, tokenizer: Any) -> list[int]:
    """Prompt tokens that each page takes, marker included; 0 for a page that is left out."""
    return [
        len(_plain_ids(tokenizer, _page_text((document,), 0, page, named=False))) if page.readable else 0
        for page in document.pages
    ]


def chat_prompt(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn.

    Args:
        messages: ``{"role": "system" | "user" | "assistant", "content": str}``. System messages are merged
            into one at the start; the content of every message is plain text, whatever it spells.
        tokenizer: one with a chat template.

    Raises:
        ConfigError: no chat template, no message, or a message of another form.
    """
    if not _has_chat_template(tokenizer):
        raise ConfigError("the tokenizer has no chat template; use an instruction-tuned model, or plain text")
    pieces, bos = _render(tokenizer, _merge_system(_check_messages(messages)))
    builder = _Builder(tokenizer, bos)
    builder.add_pieces(pieces)
    return builder.ids


# --- layout --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """A stretch of the prompt.

    ``template`` text may hold special tokens, ``plain`` text may not; ``document`` is the place of the pages.
    """

    kind: Literal["template", "plain", "document"]
    text: str = ""


_DOCUMENT = _Piece("document")


@dataclass(frozen=True)
class _Message:
    role: str
    parts: tuple[_Piece, ...]


_Rendered = tuple[list[_Piece], tuple[int, ...]]
"""Pieces in order, and the BOS ids that belong before them."""


def _layout(tokenizer: Any, turns: Sequence[HistoryTurn], instructions: str) -> _Rendered:
    """``turns`` ends with ``(question, "")``, the one to be answered."""
    if not _has_chat_template(tokenizer):
        return _plain_layout(tokenizer, turns, instructions)
    pieces, bos = _render(tokenizer, _document_chat(turns, instructions))
    alone, _ = _render(tokenizer, _document_chat([("", "")], instructions))
    if _before_document(pieces) == _before_document(alone):
        return pieces, bos
    # Some templates render the first turn differently once others follow (date lines, dropped reasoning).
    # The document prefix must not move, so the history is told inside the one user turn.
    told = _plain_turns(turns).removesuffix("\nAnswer:").removeprefix("Question: ")
    return _render(tokenizer, _document_chat([(told, "")], instructions))


def _plain_layout(tokenizer: Any, turns: Sequence[HistoryTurn], instructions: str) -> _Rendered:
    """For base models: instructions, pages, then ``Question:`` / ``Answer:`` lines to be continued."""
    before = [_Piece("plain", f"{instructions}\n\n")] if instructions else []
    return [*before, _DOCUMENT, _Piece("plain", _plain_turns(turns))], _default_bos(tokenizer)


def _plain_turns(turns: Sequence[HistoryTurn]) -> str:
    return "\n\n".join(f"Question: {question}\nAnswer: {answer}".rstrip() for question, answer in turns)


def _document_chat(turns: Sequence[HistoryTurn], instructions: str) -> list[_Message]:
    """The first user turn opens with the pages; answers and later questions are turns of their own."""
    messages = [_Message("system", (_Piece("plain", instructions),))] if instructions else []
    for index, (question, answer) in enumerate(turns):
        asked = _Piece("plain", f"Question: {question}" if index == 0 else question)
        messages.append(_Message("user", (_DOCUMENT, asked) if index == 0 else (asked,)))
        if index < len(turns) - 1:
            messages.append(_Message("assistant", (_Piece("plain", answer),)))
    return messages


def _before_document(pieces: Sequence[_Piece]) -> list[_Piece]:
    return list(pieces[: pieces.index(_DOCUMENT)])


# --- chat template -------------------------------------------------------------------------------------


def _has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _render(tokenizer: Any, messages: Sequence[_Message]) -> _Rendered:
    """Render placeholders through the chat template and put the parts where the placeholders stand.

    The placeholders are random, so no text can contain one, and the template never sees untrusted text.
    """
    pieces = _render_once(tokenizer, messages)
    if pieces is None and messages[0].role == "system":
        pieces = _render_once(tokenizer, _system_into_user(messages))
    if pieces is None:
        raise ConfigError(
            "the chat template rejects this conversation; start with user and alternate user and assistant"
        )
    return pieces, _missing_bos(tokenizer, pieces[0])


def _render_once(tokenizer: Any, messages: Sequence[_Message]) -> list[_Piece] | None:
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
    pieces: list[_Piece] = []
    for message, mark in zip(messages, marks, strict=True):
        before, found, rendered = rendered.partition(mark)
        if not found:  # the template reorders messages
            return None
        pieces += [_Piece("template", before), *message.parts]
    return [*pieces, _Piece("template", rendered)]


def _system_into_user(messages: Sequence[_Message]) -> list[_Message]:
    """For templates without a system role: its text opens the first user turn."""
    system, first, *others = messages if len(messages) > 1 else (messages[0], _Message("user", ()))
    gap = (_Piece("plain", "\n\n"),) if first.parts else ()
    return [_Message(first.role, (*system.parts, *gap, *first.parts)), *others]


def _default_bos(tokenizer: Any) -> tuple[int, ...]:
    """The BOS id in a tuple when this tokenizer puts one before every text, else nothing."""
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return ()
    return (bos,) if list(tokenizer("a", verbose=False)["input_ids"])[:1] == [bos] else ()


def _missing_bos(tokenizer: Any, first: _Piece) -> tuple[int, ...]:
    """The BOS that the template left out. Most templates spell it, and a second one hurts the model."""
    bos = _default_bos(tokenizer)
    return () if bos and tuple(_template_ids(tokenizer, first.text)[:1]) == bos else bos


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[_Message]:
    if not messages:
        raise ConfigError("messages is empty; give at least one user message")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Mapping[str, Any]) -> _Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise ConfigError(f"messages[{index}] must have 'role' and 'content'; see chat_prompt")
    role, content = message["role"], message["content"]
    if role not in ("system", "user", "assistant"):
        raise ConfigError(f"messages[{index}] has role {role!r}; use 'system', 'user' or 'assistant'")
    if not isinstance(content, str):
        raise ConfigError(f"messages[{index}] has content of type {type(content).__name__}; give a str")
    return _Message(role, (_Piece("plain", content),))


def _merge_system(messages: Sequence[_Message]) -> list[_Message]:
    """All system messages as one at the start: templates accept no other."""
    texts = [part.text for message in messages if message.role == "system" for part in message.parts]
    others = [message for message in messages if message.role != "system"]
    if not texts:
        return others
    return [_Message("system", (_Piece("plain", "\n\n".join(texts)),)), *others]


# --- tokens --------------------------------------------------------------------------------------------


class _Builder:
    """Collects token ids; every piece is encoded on its own, so that page spans are exact."""

    def __init__(self, tokenizer: Any, bos: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = list(bos)
        self.spans: list[PageSpan] = []

    def add_pieces(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            encode = _template_ids if piece.kind == "template" else _plain_ids
            self.ids += encode(self._tokenizer, piece.text)

    def add_page(self, document: int, page: Page, text: str) -> None:
        start = len(self.ids)
        self.ids += _plain_ids(self._tokenizer, text)
        self.spans.append(PageSpan(document, page.number, page.label, start, len(self.ids)))


def _template_ids(tokenizer: Any, text: str) -> list[int]:
    if not text:
        return []
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)["input_ids"])


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of untrusted text: whatever it spells, no control token comes out."""
    if not text:
        return []
    controls = _control_tokens(tokenizer)
    spelled = [token for token in controls.values() if token and token in text]
    ids = _encode_plain(tokenizer, text)
    # Not every tokenizer heeds split_special_tokens, and some mark control tokens as ordinary added ones:
    # then the spelling is cut in two, and the halves are encoded apart.
    if spelled and not controls.keys().isdisjoint(ids):
        pattern = re.compile("|".join(f"(?<={re.escape(t[:1])})(?={re.escape(t[1:])})" for t in spelled))
        ids = [part_id for part in pattern.split(text) if part for part_id in _encode_plain(tokenizer, part)]
    return ids


def _encode_plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])


def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Id and spelling of tokens that steer a model: special ones, and added ``<...>`` and ``[...]``."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    controls = {
        int(token_id): str(token)
        for token_id, token in added.items()
        if getattr(token, "special", False) or _CONTROL_SPELLING.fullmatch(str(token))
    }
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return {**controls, **dict(zip(ids, names, strict=False))}


# --- pages, checks, warnings -----------------------------------------------------------------------------


def _readable_pages(documents: Sequence[Document]) -> Iterator[tuple[int, Page]]:
    for index, document in enumerate(documents):
        for page in document.pages:
            if page.readable:
                yield index, page


def _page_text(documents: Sequence[Document], index: int, page: Page, *, named: bool) -> str:
    """``[p. 41]`` and the page; the file is named when there are several."""
    where = f"{marker_name(documents, index)} p. {page.label}" if named else f"p. {page.label}"
    text = page.text.strip("\r\n")  # spaces stay: they are the indentation of the first line
    return f"[{where}]\n{text}\n\n"


def marker_name(documents: Sequence[Document], index: int) -> str:
    """The name of a document inside ``[... p. 4]``: no brackets, and distinct within the prompt."""
    names = [_plain_name(document.name) for document in documents]
    name = names[index]
    earlier = names[:index].count(name)
    return name if not earlier else f"{name} ({earlier + 1})"


def _plain_name(name: str) -> str:
    return " ".join(re.sub(r"[\[\]\x00-\x1f\x7f]", " ", name).split())[:80] or "document"


def _check_request(
    documents: Sequence[Document], question: str, history: Sequence[HistoryTurn], answer_reserve: int
) -> list[HistoryTurn]:
    if not isinstance(question, str) or not question.strip():
        raise ConfigError("the question is empty; ask something about the document")
    if not documents:
        raise ConfigError("no document given; pass at least one")
    if answer_reserve < 0:
        raise ConfigError(f"answer_reserve={answer_reserve} must be at least 0")
    if not any(page.readable for document in documents for page in document.pages):
        names = ", ".join(document.name for document in documents[:3])
        raise NoTextError(f"{names}: no page has text that a model could read; run OCR on the file first")
    return [*((str(asked), str(answered)) for asked, answered in history), (question.strip(), "")]


def _check_limit(prompt_tokens: int, answer_reserve: int, limit: int | None) -> None:
    needed = prompt_tokens + answer_reserve
    if limit is not None and needed > limit:
        shorter_answer = prompt_tokens < limit
        remedy = (
            f"lower max_new_tokens to {limit - prompt_tokens:,} or less"
            if shorter_answer
            else "choose fewer pages or a model with a longer context"
        )
        raise ContextOverflowError(
            f"the prompt needs {needed:,} tokens ({prompt_tokens:,} and {answer_reserve:,} for the answer) "
            f"but the model takes {limit:,}; {remedy}",
            prompt_tokens=needed,
            limit=limit,
        )


def _warnings(documents: Sequence[Document]) -> tuple[str, ...]:
    """Warnings of all documents, each with its name when there are several."""
    if len(documents) == 1:
        return documents[0].warnings
    return tuple(f"{document.name}: {warning}" for document in documents for warning in document.warnings)
