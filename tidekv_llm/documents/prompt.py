"""Documents and a question become token ids, with the token range of every page.

The document always comes first and the question last, so that ``token_ids[:document_end]`` is the same for
every question: a session prefills it once. Text from documents and users is untrusted: special tokens spelled
in it are encoded as plain text, and only the chat template itself may open or close a turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidekv_llm.documents.pages import Document, Page
from tidekv_llm.documents.template import (
    DOCUMENT,
    Message,
    Piece,
    TemplateKwargs,
    default_bos,
    encode,
    encode_chat,
    has_chat_template,
    render,
    turn_end,
)
from tidekv_llm.documents.tokens import plain_ids
from tidekv_llm.errors import ConfigError, ContextOverflowError, NoTextError

# Short on purpose: a second sentence made no difference to what SmolLM2-135M got right on the sample.
DEFAULT_INSTRUCTIONS = "Answer the question briefly, using the document."

# A model without a chat template is shown turns that begin so, and goes on with the next one by itself.
_PLAIN_STOPS = ("\n\nQuestion:", "\nQuestion:")

HistoryTurn = tuple[str, str]
"""An earlier question and its answer."""


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
        stop: what the next turn would begin with, where no control token ends the answer before.
    """

    token_ids: tuple[int, ...]
    spans: tuple[PageSpan, ...]
    document_end: int
    question: str
    warnings: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class DocumentLayout:
    """The documents' part of a prompt, which no question changes; :func:`lay_out` makes it, once.

    Attributes:
        tokenizer: encodes what follows, too.
        instructions: what the model is told to do with the documents.
        token_ids: everything up to the end of the last page.
        spans: token ranges of the pages.
        warnings: pages left out, and what the documents warn of.
        stop: what the next turn would begin with, where no control token ends the answer before.
        chat_template_kwargs: values for the chat template's own names.
    """

    tokenizer: Any
    instructions: str
    token_ids: tuple[int, ...]
    spans: tuple[PageSpan, ...]
    warnings: tuple[str, ...]
    stop: tuple[str, ...]
    chat_template_kwargs: TemplateKwargs | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each document ends, ascending; the last is the length of all."""
        return _ends(self.spans, len(self))

    def prompt(
        self,
        question: str,
        history: Sequence[HistoryTurn] = (),
        *,
        limit: int | None = None,
        answer_reserve: int = 0,
    ) -> Prompt:
        """The whole prompt: documents, history, question.

        Args:
            question: what the user asks; it goes last.
            history: earlier (question, answer) pairs, oldest first.
            limit: tokens the model can take; None for no check.
            answer_reserve: tokens to keep free for the answer, counted against ``limit``.

        Raises:
            ConfigError: an empty question, a negative reserve.
            ContextOverflowError: prompt and reserve exceed ``limit``; nothing is ever cut.
        """
        _check_question(question)
        ids = (*self.token_ids, *self.behind(question, history))
        self.check(limit, answer_reserve, len(ids) - len(self))
        return Prompt(ids, self.spans, len(self), question, self.warnings, self.stop)

    def behind(self, question: str, history: Sequence[HistoryTurn] = ()) -> list[int]:
        """Token ids of what follows the documents; an empty question gives the frame that every question has."""
        turns = [*((str(asked), str(answered)) for asked, answered in history), (question.strip(), "")]
        return encode(self.tokenizer, _Frame.of(self).behind(turns))

    def check(self, limit: int | None, answer_reserve: int = 0, behind: int = 0) -> None:
        """Raise :class:`ContextOverflowError` if the documents, so much behind them and an answer exceed ``limit``."""
        if answer_reserve < 0:
            raise ConfigError(f"answer_reserve={answer_reserve} must be at least 0")
        _check_limit(len(self) + behind, answer_reserve, limit)


def lay_out(
    documents: Document | Sequence[Document],
    tokenizer: Any,
    *,
    instructions: str = DEFAULT_INSTRUCTIONS,
    unnamed: int | None = None,
    chat_template_kwargs: TemplateKwargs | None = None,
) -> DocumentLayout:
    """Lay out instructions and pages.

    Args:
        documents: one document or several; pages with a problem are left out and named in ``warnings``.
        tokenizer: a Hugging Face tokenizer; its chat template is used when it has one.
        instructions: what the model should do with the document.
        unnamed: how many of the first documents have page markers without the file's name; by default one if it is
            alone, else none. A session that was opened with one document and has more appended keeps the first one's
            markers as they were.
        chat_template_kwargs: values for the chat template's own names, ``{"enable_thinking": True}`` say.

    Raises:
        ConfigError: no document, or a template that does not take one.
        NoTextError: no page can be read.
    """
    chosen = (documents,) if isinstance(documents, Document) else tuple(documents)
    _check_documents(chosen)
    instructions = instructions.strip()
    frame = _Frame(tokenizer, instructions, chat_template_kwargs)
    ids, spans = frame.before(), []
    unnamed, names = int(len(chosen) == 1) if unnamed is None else unnamed, document_names(chosen)
    for index, page in _readable_pages(chosen):
        start = len(ids)
        ids += plain_ids(tokenizer, _page_text(page, names[index] if index >= unnamed else ""))
        spans.append(PageSpan(index, page.number, page.label, start, len(ids)))
    return DocumentLayout(
        tokenizer, instructions, tuple(ids), tuple(spans), _warnings(chosen), frame.stop(), chat_template_kwargs
    )


def build_prompt(
    documents: Document | Sequence[Document],
    question: str,
    tokenizer: Any,
    *,
    history: Sequence[HistoryTurn] = (),
    instructions: str = DEFAULT_INSTRUCTIONS,
    limit: int | None = None,
    answer_reserve: int = 0,
    chat_template_kwargs: TemplateKwargs | None = None,
) -> Prompt:
    """Lay out instructions, pages, history and question, in this order.

    The arguments are those of :func:`lay_out` and of :meth:`DocumentLayout.prompt`.

    Raises:
        ConfigError: an empty question, no document, a negative reserve.
        NoTextError: no page can be read.
        ContextOverflowError: prompt and reserve exceed ``limit``; nothing is ever cut.
    """
    _check_question(question)  # before the long part
    layout = lay_out(documents, tokenizer, instructions=instructions, chat_template_kwargs=chat_template_kwargs)
    return layout.prompt(question, history, limit=limit, answer_reserve=answer_reserve)


def document_ends(prompt: Prompt) -> tuple[int, ...]:
    """Where each document ends in the prompt, ascending: the last is ``document_end``.

    Prefills cut their chunks there, so that a document that is appended later leaves the earlier ones as they were.
    """
    return _ends(prompt.spans, prompt.document_end)


def _ends(spans: Sequence[PageSpan], document_end: int) -> tuple[int, ...]:
    ends = {span.document: span.stop for span in spans}
    return tuple(sorted({*ends.values(), document_end}))


def count_document_tokens(document: Document, tokenizer: Any) -> list[int]:
    """Prompt tokens that each page takes, marker included; 0 for a page that is left out."""
    return [len(plain_ids(tokenizer, _page_text(page))) if page.readable else 0 for page in document.pages]


def chat_prompt(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, chat_template_kwargs: TemplateKwargs | None = None
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn.

    Args:
        messages: ``{"role": "system" | "user" | "assistant", "content": str}``. System messages are merged
            into one at the start, and neighbours of one role into one message; the content of every message is
            plain text, whatever it spells.
        tokenizer: one with a chat template.
        chat_template_kwargs: values for the template's own names, ``{"enable_thinking": True}`` say.

    Raises:
        ConfigError: no chat template, no message, a message of another form, or one that the template refuses.
    """
    if not has_chat_template(tokenizer):
        raise ConfigError("the tokenizer has no chat template; use an instruction-tuned model, or plain text")
    return encode_chat(tokenizer, _merge_neighbours(_merge_system(_check_messages(messages))), chat_template_kwargs)


# --- layout --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    """What stands around the pages."""

    tokenizer: Any
    instructions: str
    chat_template_kwargs: TemplateKwargs | None

    @classmethod
    def of(cls, layout: DocumentLayout) -> _Frame:
        return cls(layout.tokenizer, layout.instructions, layout.chat_template_kwargs)

    def before(self) -> list[int]:
        """Token ids in front of the pages."""
        pieces, bos = self._pieces([("", "")])
        return [*bos, *encode(self.tokenizer, _before_document(pieces))]

    def behind(self, turns: Sequence[HistoryTurn]) -> list[Piece]:
        """What follows the pages; ``turns`` ends with ``(question, "")``, the one to answer."""
        pieces, _ = self._pieces(turns)
        alone, _ = self._pieces([("", "")])
        if _before_document(pieces) != _before_document(alone):
            # Some templates render the first turn differently once others follow (date lines, dropped reasoning).
            # The document part must not move, so the history is told inside the one user turn.
            told = _plain_turns(turns).removesuffix("\nAnswer:").removeprefix("Question: ")
            pieces, _ = self._pieces([(told, "")])
        return pieces[pieces.index(DOCUMENT) + 1 :]

    def stop(self) -> tuple[str, ...]:
        """What the next turn would begin with, where text alone tells it."""
        if not has_chat_template(self.tokenizer):
            return _PLAIN_STOPS
        text = turn_end(self.tokenizer).text
        return (text,) if text else ()

    def _pieces(self, turns: Sequence[HistoryTurn]) -> tuple[list[Piece], tuple[int, ...]]:
        if has_chat_template(self.tokenizer):
            return render(self.tokenizer, _document_chat(turns, self.instructions), self.chat_template_kwargs)
        # For base models: instructions, pages, then "Question:" / "Answer:" lines to be continued.
        before = [Piece("plain", f"{self.instructions}\n\n")] if self.instructions else []
        return [*before, DOCUMENT, Piece("plain", _plain_turns(turns))], default_bos(self.tokenizer)


def _plain_turns(turns: Sequence[HistoryTurn]) -> str:
    return "\n\n".join(f"Question: {question}\nAnswer: {answer}".rstrip() for question, answer in turns)


def _document_chat(turns: Sequence[HistoryTurn], instructions: str) -> list[Message]:
    """The first user turn opens with the pages; answers and later questions are turns of their own."""
    messages = [Message("system", (Piece("plain", instructions),))] if instructions else []
    for index, (question, answer) in enumerate(turns):
        asked = Piece("plain", f"Question: {question}" if index == 0 else question)
        messages.append(Message("user", (DOCUMENT, asked) if index == 0 else (asked,)))
        if index < len(turns) - 1:
            messages.append(Message("assistant", (Piece("plain", answer),)))
    return messages


def _before_document(pieces: Sequence[Piece]) -> list[Piece]:
    return list(pieces[: pieces.index(DOCUMENT)])


def _check_messages(messages: Any) -> list[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError("messages is empty; give at least one user message")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise ConfigError(f"messages[{index}] must have 'role' and 'content'; see chat_prompt")
    role, content = message["role"], message["content"]
    if role not in ("system", "user", "assistant"):
        raise ConfigError(f"messages[{index}] has role {role!r}; use 'system', 'user' or 'assistant'")
    if not isinstance(content, str):
        raise ConfigError(f"messages[{index}] has content of type {type(content).__name__}; give a str")
    return Message(role, (Piece("plain", content),))


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    """All system messages as one at the start: templates accept no other."""
    texts = [part.text for message in messages if message.role == "system" for part in message.parts]
    others = [message for message in messages if message.role != "system"]
    if not texts:
        return others
    return [Message("system", (Piece("plain", "\n\n".join(texts)),)), *others]


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message: many templates insist on turns that alternate."""
    merged: list[Message] = []
    for message in messages:
        if merged and merged[-1].role == message.role:
            text = f"{merged.pop().text}\n\n{message.text}"
            message = Message(message.role, (Piece("plain", text),))
        merged.append(message)
    return merged


# --- pages, checks, warnings -----------------------------------------------------------------------------


def _readable_pages(documents: Sequence[Document]) -> Iterator[tuple[int, Page]]:
    for index, document in enumerate(documents):
        for page in document.pages:
            if page.readable:
                yield index, page


def _page_text(page: Page, name: str = "") -> str:
    """``[p. 41]`` and the page; the file is named when there are several."""
    where = f"{name} p. {page.label}" if name else f"p. {page.label}"
    text = page.text.strip("\r\n")  # spaces stay: they are the indentation of the first line
    return f"[{where}]\n{text}\n\n"


def document_names(documents: Sequence[Document]) -> tuple[str, ...]:
    """What each document is called, in the prompt's markers and in citations alike.

    Several are told apart (``invoice.pdf``, ``invoice.pdf (2)``) and have no brackets, which end a marker. The names
    of the first documents stay when more are appended. A document that is alone keeps its name as it is.
    """
    if len(documents) == 1:
        return (documents[0].name,)
    names: list[str] = []
    for document in documents:
        plain = _plain_name(document.name)
        taken = {name.casefold() for name in names}  # a model that cites may change the case
        candidates = [plain, *(f"{plain} ({number})" for number in range(2, len(names) + 2))]
        names.append(next(name for name in candidates if name.casefold() not in taken))
    return tuple(names)


def _plain_name(name: str) -> str:
    rounded = name.translate({ord("["): "(", ord("]"): ")"})
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", rounded).split())[:80] or "document"


def _check_question(question: str) -> None:
    if not isinstance(question, str) or not question.strip():
        raise ConfigError("the question is empty; ask something about the document")


def _check_documents(documents: Sequence[Document]) -> None:
    if not documents:
        raise ConfigError("no document given; pass at least one")
    if not any(page.readable for document in documents for page in document.pages):
        names = ", ".join(document.name for document in documents[:3])
        raise NoTextError(f"{names}: no page has text that a model could read; run OCR on the file first")


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
    named = zip(document_names(documents), documents, strict=True)
    return tuple(f"{name}: {warning}" for name, document in named for warning in document.warnings)
