"""An event loop goes on whatever a model does meanwhile: load, read its tokenizer, prefill, decode."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate

from langchain_tidekv import ChatTideKV, stuff_documents_chain
from langchain_tidekv import TideKVLLM as LangChainLLM
from llama_index.llms.tidekv import TideKVLLM as LlamaIndexLLM
from tests.integrations.frameworks import Framework
from tests.pulse import Pulse
from tidekv_llm import models
from tidekv_llm.engine import TideKV
from tidekv_llm.service import EngineHandle

PROMPT = "Tell me about the sea."


def slow(pulse: Pulse, real: Callable[..., Any]) -> Callable[..., Any]:
    """The same, not before the loop came round twenty times."""

    def work(*arguments: Any, **options: Any) -> Any:
        pulse.wait()
        return real(*arguments, **options)

    return work


def test_the_loop_goes_on_while_a_model_loads_and_others_wait_for_it(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request, of the same object or of another one, came to a lock that the first held while loading."""
    pulse, loads = Pulse(), []
    real = TideKV.from_pretrained
    monkeypatch.setattr(TideKV, "from_pretrained", slow(pulse, lambda *a, **k: loads.append(a) or real(*a, **k)))

    async def ask() -> list[str]:
        first = asyncio.create_task(framework.atext(llm, PROMPT))
        await asyncio.sleep(0.01)
        return await asyncio.gather(first, *(framework.atext(one, PROMPT) for one in (llm, other, llm)))

    with framework.make(tiny) as llm, framework.make(tiny, kept_tokens=1024) as other:
        assert len(set(pulse.run(ask()))) == 1
    assert len(loads) == 1


def test_the_loop_goes_on_when_one_is_closed_during_a_load(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = Pulse()
    monkeypatch.setattr(TideKV, "from_pretrained", slow(pulse, TideKV.from_pretrained))

    async def ask() -> str:
        first = asyncio.create_task(framework.atext(llm, PROMPT))
        await asyncio.sleep(0.01)
        framework.make(tiny).close()
        return await first

    with framework.make(tiny) as llm:
        assert pulse.run(ask())
        assert llm.engine_handle().loaded


def test_what_is_closed_while_it_loads_is_freed(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = Pulse()
    monkeypatch.setattr(TideKV, "from_pretrained", slow(pulse, TideKV.from_pretrained))

    async def ask() -> None:
        first = asyncio.create_task(framework.atext(llm, PROMPT))
        await asyncio.sleep(0.01)
        llm.close()
        with pytest.raises(framework.error, match="closed"):
            await first

    llm = framework.make(tiny)
    pulse.run(ask())
    assert not llm.engine_handle()._slot.loaded


def test_the_loop_goes_on_during_a_request(framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LI#11842."""
    pulse = Pulse()
    monkeypatch.setattr(TideKV, "stream", slow(pulse, TideKV.stream))

    async def ask() -> tuple[str, str]:
        return await framework.atext(llm, PROMPT), "".join([delta async for delta in framework.adeltas(llm, PROMPT)])

    with framework.make(tiny) as llm:
        whole, streamed = pulse.run(ask())
    assert whole == streamed


async def all_of(chunks: Any) -> str:
    return "".join([str(chunk) async for chunk in chunks])


QUESTION = {"context": [Document("The sea.")], "question": "What?"}
MESSAGES = [ChatMessage(role="user", content="Hi")]


def chat_engine(llm: Any) -> SimpleChatEngine:
    return SimpleChatEngine.from_defaults(llm=llm, memory=ChatMemoryBuffer.from_defaults(llm=llm))


ASKED: dict[str, tuple[Any, Callable[[Any], Callable[[], Awaitable[Any]]]]] = {
    "achat": (LlamaIndexLLM, lambda llm: partial(llm.achat, MESSAGES)),
    "acomplete": (LlamaIndexLLM, lambda llm: partial(llm.acomplete, "Hi")),
    "apredict": (LlamaIndexLLM, lambda llm: partial(llm.apredict, PromptTemplate("Hi {name}"), name="Anna")),
    "chat-engine": (LlamaIndexLLM, lambda llm: partial(chat_engine(llm).achat, "Hi")),
    "messages-to-llm": (LangChainLLM, lambda llm: partial(llm.ainvoke, [HumanMessage("Hi")])),
    "messages-to-chat": (ChatTideKV, lambda llm: partial(llm.ainvoke, [HumanMessage("Hi")])),
    "stuff-chain": (LangChainLLM, lambda llm: partial(stuff_documents_chain(llm).ainvoke, QUESTION)),
}


@pytest.mark.parametrize("name", ASKED)
def test_no_tokenizer_is_read_on_the_loop(name: str, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is no local folder (a GGUF file, a hub id) only the tokenizer tells whether it has a template."""
    pulse = Pulse()
    kind, prepare = ASKED[name]
    monkeypatch.setattr(EngineHandle, "_local_folder", lambda handle: None)
    monkeypatch.setattr(models, "load_tokenizer", slow(pulse, models.load_tokenizer))
    monkeypatch.setattr(TideKV, "from_pretrained", slow(pulse, TideKV.from_pretrained))

    async def asked() -> Any:
        return await ask()

    with kind(model=tiny, max_tokens=3) as llm:
        ask = prepare(llm)
        assert pulse.run(asked())


def test_no_tokenizer_is_read_on_the_loop_of_a_stream(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse()
    monkeypatch.setattr(EngineHandle, "_local_folder", lambda handle: None)
    monkeypatch.setattr(models, "load_tokenizer", slow(pulse, models.load_tokenizer))

    async def streams(llm: Any) -> list[str]:
        chat = [chunk.delta async for chunk in await llm.astream_chat(MESSAGES)]
        return ["".join(chat), await all_of(await llm.astream(PromptTemplate("Hi")))]

    with LlamaIndexLLM(model=tiny, max_tokens=3) as llm:
        assert len(set(pulse.run(streams(llm)))) == 1
