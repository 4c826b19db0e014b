"""Conversations and document questions on their way through LangChain, which knows texts and messages only."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from pydantic import PrivateAttr

from tidekv_llm.errors import ConfigError
from tidekv_llm.service import DocumentRequest, merged_messages

_ROLES = {"human": "user", "ai": "assistant", "developer": "system", "function": "tool"}


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
    pairs = [(_role(message), _text(message)) for message in messages]
    return merged_messages([("user" if role == "tool" else role, text) for role, text in pairs])


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage | HumanMessage | AIMessage):
        return _ROLES.get(message.type, message.type).removesuffix("MessageChunk").lower()
    role = message.role if isinstance(message, ChatMessage) else message.type
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise ConfigError(f"a message has role {role!r}; use system, human, ai or tool")
    return role


def _text(message: BaseMessage) -> str:
    other = [
        block.get("type", "?")
        for block in (message.content if isinstance(message.content, list) else ())
        if isinstance(block, dict) and block.get("type") not in ("text", "reasoning")
    ]
    if other:
        raise ConfigError(f"a message holds {other[0]!r} content; these models read text only")
    return str(message.text)
