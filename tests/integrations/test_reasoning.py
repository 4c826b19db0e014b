"""What a model thought is apart from what it answered, in every framework and in all ways to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core.base.llms.types import ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from pydantic import BaseModel

from langchain_tidekv import ChatTideKV, TideKVLLM, stuff_documents_chain
from langchain_tidekv.prompts import engine_messages
from llama_index.llms.tidekv import TideKVLLM as LlamaIndexLLM
from llama_index.llms.tidekv import WholeDocumentQueryEngine
from llama_index.llms.tidekv.base import engine_messages as of_llama_index
from tests.engine.speaking import CHATML, begin_again, speaking
from tidekv_llm import TideKV
from tidekv_llm.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_token_a_step")

THOUGHT, ANSWER = "So many metres.", "It is 41."
SPECIAL = ("<|im_start|>", "<|im_end|>")


@pytest.fixture
def engine() -> Iterator[TideKV]:
    with speaking(f"<think>{THOUGHT}</think>{ANSWER}<|im_end|>", special=SPECIAL) as made:
        yield made


def total(parts: list[Any]) -> Any:
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    return added


async def drained(parts: Any) -> list[Any]:
    return [part async for part in parts]


def test_langchain_chat(engine: TideKV) -> None:
    chat = ChatTideKV(engine=engine)
    for ask in (
        lambda: chat.invoke("How high?"),
        lambda: total(list(chat.stream("How high?"))),
        lambda: asyncio.run(chat.ainvoke("How high?")),
        lambda: total(asyncio.run(drained(chat.astream("How high?")))),
    ):
        begin_again(engine)
        message = ask()
        assert (message.text, message.additional_kwargs) == (ANSWER, {"reasoning_content": THOUGHT})
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
        assert engine_messages([message])[0]["content"] == ANSWER  # no later prompt tells the thoughts


def test_langchain_llm(engine: TideKV) -> None:
    llm = TideKVLLM(engine=engine)
    assert llm.invoke("How high?") == ANSWER
    begin_again(engine)
    assert "".join(llm.stream("How high?")) == ANSWER
    begin_again(engine)
    assert llm.generate(["How high?"]).generations[0][0].generation_info["reasoning_content"] == THOUGHT


@pytest.mark.parametrize("kind", [TideKVLLM, ChatTideKV])
def test_document_chain(kind: Any, engine: TideKV) -> None:
    chain = stuff_documents_chain(kind(engine=engine))
    value = {"context": [Document("So many metres. The tower.")], "question": "How high?"}
    for ask in (lambda: chain.invoke(value), lambda: total(list(chain.stream(value)))):
        begin_again(engine)
        found = ask()
        assert (found["answer"], found["reasoning"]) == (ANSWER, THOUGHT)
        assert not any(THOUGHT in str(citation["quote"]) for citation in found["citations"])


class Tower(BaseModel):
    metres: int


def test_structured_output_is_read_from_the_answer() -> None:
    with speaking('<think>{"metres": 1}</think>{"metres": 41}<|im_end|>', special=SPECIAL) as engine:
        chat = ChatTideKV(engine=engine)
        assert chat.with_structured_output(Tower).invoke("How high?") == Tower(metres=41)


def test_llama_index_chat(engine: TideKV) -> None:
    llm, asked = LlamaIndexLLM(engine=engine), [ChatMessage(role="user", content="How high?")]

    async def streamed() -> Any:
        return (await drained(await llm.astream_chat(asked)))[-1]

    for ask in (
        lambda: llm.chat(asked),
        lambda: list(llm.stream_chat(asked))[-1],
        lambda: asyncio.run(llm.achat(asked)),
        lambda: asyncio.run(streamed()),
    ):
        begin_again(engine)
        message = ask().message
        thoughts = [block.content for block in message.blocks if isinstance(block, ThinkingBlock)]
        assert (message.content, thoughts) == (ANSWER, [THOUGHT])
        assert of_llama_index([message]) == [{"role": "assistant", "content": ANSWER}]


def test_llama_index_streams_thoughts_apart(engine: TideKV) -> None:
    llm = LlamaIndexLLM(engine=engine)
    chunks = list(llm.stream_chat([ChatMessage(role="user", content="How high?")]))
    assert "".join(chunk.delta for chunk in chunks) == ANSWER
    assert "".join(chunk.additional_kwargs.get("thinking_delta", "") for chunk in chunks) == THOUGHT
    begin_again(engine)
    assert llm.complete("How high?").text == ANSWER


@pytest.mark.parametrize("streaming", [False, True])
def test_llama_index_query_engine(streaming: bool, engine: TideKV) -> None:
    asked = WholeDocumentQueryEngine(LlamaIndexLLM(engine=engine), [TextNode(text="The tower.")], streaming=streaming)
    response = asked.query("How high?")
    assert ("".join(response.response_gen) if streaming else str(response)) == ANSWER
    assert response.metadata["reasoning"] == THOUGHT


SWITCHED = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{{ '' if thinking | default(true) else 'no' }}{% endif %}"
)


@pytest.mark.parametrize("kind", [ChatTideKV, TideKVLLM, LlamaIndexLLM])
def test_the_templates_own_names_reach_it_from_the_object_and_from_the_call(kind: Any) -> None:
    with speaking(f"{ANSWER}<|im_end|>", SWITCHED, special=SPECIAL) as engine:

        def tokens(llm: Any, **options: Any) -> int:
            begin_again(engine)
            if kind is LlamaIndexLLM:
                return llm.complete("How high?", **options).raw["usage"]["prompt_tokens"]
            made = llm.generate_prompt([llm._convert_input("How high?")], **options).generations[0][0]
            return made.generation_info["token_usage"]["prompt_tokens"]

        off = {"chat_template_kwargs": {"thinking": False}}
        plain = tokens(kind(engine=engine))
        assert tokens(kind(engine=engine, **off)) == plain + 2
        assert tokens(kind(engine=engine), **off) == plain + 2


def test_an_opening_word_of_the_assistant_is_not_given_the_systems() -> None:
    """A template without a system role, and a conversation that the assistant opens."""
    strict = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    talk = [
        ("system", "Be kind."),
        ("assistant", "Hello!"),
        ("user", "Hi"),
        ("system", "Be brief."),
        ("user", "How high?"),
    ]
    with speaking(f"{ANSWER}<|im_end|>", strict, special=SPECIAL) as engine:
        messages = of_llama_index([ChatMessage(role=role, content=text) for role, text in talk])
        prompt = engine.tokenizer.decode(engine.encode(messages))
        assert "user\nBe kind.\n\nBe brief.<|im_end|>" in prompt
        assert "assistant\nHello!<|im_end|>" in prompt and "user\nHi\n\nHow high?<|im_end|>" in prompt
        assert (
            LlamaIndexLLM(engine=engine).chat([ChatMessage(role=r, content=t) for r, t in talk]).message.content
            == ANSWER
        )


def test_a_template_kwarg_for_a_raw_text_is_refused(tiny: str) -> None:
    llm = LlamaIndexLLM(model=tiny, chat_template=False, chat_template_kwargs={"x": 1})
    with llm, pytest.raises(ConfigError, match="chat_template_kwargs"):
        llm.complete("Hi")
