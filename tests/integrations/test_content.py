"""What is in a message besides plain text: blocks of other providers are read, passed over or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from llama_index.core.base.llms.types import CachePoint, CitableBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import AudioBlock, ChatMessage, DocumentBlock, ImageBlock, TextBlock

from langchain_tidekv import ChatTideKV, TideKVLLM
from langchain_tidekv.prompts import engine_messages
from llama_index.llms.tidekv.base import engine_messages as of_llama_index
from tidekv_llm.errors import ConfigError

TEXT = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([TEXT], "Hi"),
        (["Hi"], "Hi"),
        ([{"type": "thinking", "thinking": "Hm.", "signature": "x"}, TEXT], "Hi"),
        ([{"type": "redacted_thinking", "data": "x"}, TEXT], "Hi"),
        ([{"type": "reasoning", "reasoning": "Hm."}, TEXT], "Hi"),
        ([{"type": "reasoning", "summary": []}, {"type": "output_text", "text": "Hi", "annotations": []}], "Hi"),
        ([{"type": "input_text", "text": "Hi"}], "Hi"),
        ([TEXT, {"type": "tool_use", "id": "1", "name": "add", "input": {}}], "Hi"),
        ([TEXT, {"type": "tool_call", "id": "1", "name": "add", "args": {}}], "Hi"),
        ([TEXT, {"type": "function_call", "name": "add", "arguments": "{}"}], "Hi"),
        ([TEXT, {"cachePoint": {"type": "default"}}], "Hi"),
        ([{**TEXT, "cache_control": {"type": "ephemeral"}}], "Hi"),
        ([{"type": "tool_result", "tool_use_id": "1", "content": [TEXT]}], "Hi"),
        ([{"type": "tool_result", "tool_use_id": "1", "content": "Hi"}], "Hi"),
        ([{"text": "Hi"}], "Hi"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [HumanMessage, AIMessage, SystemMessage, AIMessageChunk])
def test_blocks_of_other_providers(kind: Any, content: Any, text: str) -> None:
    assert engine_messages([HumanMessage("Well?"), kind(content)])[-1 if kind is not SystemMessage else 0][
        "content"
    ].endswith(text)
    whole = "".join(message["content"] for message in engine_messages([kind(content)]))
    assert whole == text


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "image_url"),
        ({"type": "image", "base64": "AA==", "mime_type": "image/png"}, "image"),
        ({"type": "input_image", "image_url": "data:image/png;base64,AA=="}, "input_image"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "(input_)?audio"),
        ({"type": "audio", "base64": "AA=="}, "audio"),
        ({"type": "video", "base64": "AA=="}, "video"),
        ({"type": "file", "base64": "AA=="}, "file"),
        ({"image": {"format": "png", "source": {"bytes": b"x"}}}, "image"),
        ({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "base64": "AA=="}]}, "image"),
        ({}, r"\?"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [TideKVLLM, ChatTideKV])
def test_pictures_and_sounds_are_refused_by_name(kind: Any, tiny: str, block: Any, name: str) -> None:
    with (
        kind(model=tiny) as llm,
        pytest.raises(ModelInvalidRequestError, match=f"holds '{name}' content; .* text only"),
    ):
        llm.invoke([HumanMessage([TEXT, block])])


def test_a_conversation_with_tools_and_thoughts_goes_through(tiny: str) -> None:
    call = {"type": "tool_call", "name": "add", "args": {}, "id": "1"}
    with ChatTideKV(model=tiny, max_tokens=3) as chat:
        talk = [
            HumanMessage("2+2?"),
            AIMessage(
                [{"type": "thinking", "thinking": "Hm."}, call], tool_calls=[{"name": "add", "args": {}, "id": "1"}]
            ),
            ToolMessage([TEXT], tool_call_id="1"),
        ]
        assert chat.invoke(talk).text
        assert chat.get_num_tokens_from_messages(talk) > 0


def test_blocks_of_llama_index() -> None:
    blocks: list[Any] = [
        ThinkingBlock(content="Hm."),
        TextBlock(text="One"),
        CachePoint(cache_control={"type": "ephemeral"}),
        ToolCallBlock(tool_name="add", tool_kwargs={}),
        CitableBlock(title="t", source="s", content=[TextBlock(text="Two")]),
    ]
    assert of_llama_index([ChatMessage(role="user", blocks=blocks)]) == [{"role": "user", "content": "One\nTwo"}]


@pytest.mark.parametrize(
    "block", [ImageBlock(image=b"x"), AudioBlock(audio=b"x"), DocumentBlock(data=b"x")], ids=lambda one: one.block_type
)
def test_what_llama_index_cannot_be_read_is_refused_by_name(block: Any) -> None:
    inside = [] if isinstance(block, AudioBlock) else [CitableBlock(title="t", source="s", content=[block])]
    for one in (block, *inside):
        with pytest.raises(ConfigError, match=rf"'{block.block_type}' block; .* text only"):
            of_llama_index([ChatMessage(role="user", blocks=[one])])


def test_tools_are_refused_with_a_reason_and_a_remedy(tiny: str) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with ChatTideKV(model=tiny) as chat:
        with pytest.raises(ModelInvalidRequestError, match=r"cannot call tools: .* use with_structured_output"):
            chat.bind_tools([add])
        for name in ("tools", "tool_choice", "functions"):
            with pytest.raises(ModelInvalidRequestError, match=f"{name}= is refused: .* put what a tool said"):
                chat.invoke("Hi", **{name: [{}]})
