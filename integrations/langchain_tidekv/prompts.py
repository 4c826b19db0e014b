"""Conversations and document questions on their way through LangChain, which knows texts and messages only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, ChatMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from pydantic import PrivateAttr

from tidekv_llm.errors import ConfigError
from tidekv_llm.service import DocumentRequest, merged_messages

_ROLES = {"human": "user", "ai": "assistant", "developer": "system", "function": "user", "tool": "user"}
_TEXT_BLOCKS = ("text", "input_text", "output_text", "text-plain", "refusal")
_RESULT_BLOCKS = ("tool_result", "function_call_output")
_PASSED_OVER = (
    *("thinking", "redacted_thinking", "reasoning", "reasoning_content"),
    *("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call", "server_tool_use"),
    *("cachePoint", "cache_point", "non_standard"),
)


class PromptText(str):
    """What BaseLLM sees of a conversation or a document question: a text that remembers what it stands for."""

    payload: list[dict[str, str]] | DocumentRequest

    def __new__(cls, text: str, payload: list[dict[str, str]] | DocumentRequest) -> PromptText:
        made = super().__new__(cls, text)
        made.payload = payload
        return made


class MessagesPrompt(ChatPromptValue):
    """Messages whose string form keeps them, so that the model's own chat template can be applied."""

    def to_string(self) -> str:
        return PromptText(super().to_string(), engine_messages(self.messages))


class DocumentMessage(HumanMessage):
    """A question about whole documents; its content is what a trace shows."""

    _request: DocumentRequest | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, request: DocumentRequest) -> DocumentMessage:
        message = cls(content=request.as_text())
        message._request = request
        return message

    @property
    def request(self) -> DocumentRequest | None:
        """The documents and the question."""
        return self._request


class DocumentPrompt(PromptValue):
    """A document question for either kind of model."""

    message: DocumentMessage

    def to_string(self) -> str:
        assert self.message.request is not None
        return PromptText(str(self.message.content), self.message.request)

    def to_messages(self) -> list[BaseMessage]:
        return [self.message]


def keep_messages(value: PromptValue) -> PromptValue:
    """The same prompt, with messages that survive being turned into a string."""
    if isinstance(value, ChatPromptValue) and not isinstance(value, MessagesPrompt):
        return MessagesPrompt(messages=value.messages)
    return value


def payload_of(messages: Sequence[BaseMessage]) -> list[dict[str, str]] | DocumentRequest:
    """What the model is asked: a document question, or the conversation."""
    if len(messages) == 1 and isinstance(messages[0], DocumentMessage) and messages[0].request is not None:
        return messages[0].request
    return engine_messages(messages)


def engine_messages(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """LangChain's messages as the engine's.

    Raises:
        ConfigError: content that is not text, or an empty prompt.
    """
    return merged_messages(roles_and_texts(messages))


def roles_and_texts(messages: Sequence[BaseMessage]) -> list[tuple[str, str]]:
    """The engine's role and the text of each message; what a tool said reaches the model as the user's words.

    Raises:
        ConfigError: content that is not text.
    """
    return [(_role(message), text_of(message)) for message in messages]


def _role(message: BaseMessage) -> str:
    role = message.role if isinstance(message, ChatMessage) else message.type.removesuffix("MessageChunk").lower()
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant"):
        raise ConfigError(f"a message has role {role!r}; use system, human, ai or tool")
    return role


def text_of(message: BaseMessage) -> str:
    """The text of a message; its reasoning, its calls of tools and marks for caches are passed over.

    Raises:
        ConfigError: content that is not text.
    """
    content = message.content
    return "".join(map(_block_text, [content] if isinstance(content, str) else content))


def _block_text(block: str | dict[Any, Any]) -> str:
    """The text of a block of any provider: ``text``, OpenAI's ``input_text`` and ``output_text``, a tool's result."""
    if isinstance(block, str):
        return block
    kind = str(block.get("type", "text" if "text" in block else next(iter(block), "?")))
    if kind in _TEXT_BLOCKS:
        text = block.get("text", "")
        return str(text) if not isinstance(text, list) else "".join(map(_block_text, text))
    if kind in _RESULT_BLOCKS:
        found = block.get("content", block.get("output", ""))
        return "".join(map(_block_text, [found] if isinstance(found, str | dict) else found or []))
    if kind in _PASSED_OVER:
        return ""
    raise ConfigError(f"a message holds {kind!r} content; these models read text only")
