"""The same calls for LangChain's two kinds of model and LlamaIndex's, so that one test covers all three."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.exceptions import ContextOverflowError as LangChainOverflow
from langchain_core.exceptions import ModelError
from langchain_core.outputs import GenerationChunk

from langchain_tidekv import ChatTideKV
from langchain_tidekv import TideKVLLM as LangChainLLM
from llama_index.llms.tidekv import TideKVLLM as LlamaIndexLLM
from tidekv_llm.errors import ContextOverflowError, TideKVError


class Framework:
    """One kind of model.

    ``info`` is what the framework's response says besides the text: usage, finish reason and metrics.
    """

    name: str
    model: type[Any]
    overflow: type[Exception] = ContextOverflowError
    error: type[Exception] = TideKVError

    def make(self, model: str, **options: Any) -> Any:
        return self.model(model=model, **{"max_tokens": 12, **options})

    def text(self, llm: Any, prompt: str, **options: Any) -> str:
        raise NotImplementedError

    async def atext(self, llm: Any, prompt: str, **options: Any) -> str:
        raise NotImplementedError

    def deltas(self, llm: Any, prompt: str, **options: Any) -> Iterator[str]:
        raise NotImplementedError

    def adeltas(self, llm: Any, prompt: str, **options: Any) -> AsyncIterator[str]:
        raise NotImplementedError

    def info(self, llm: Any, prompt: str) -> dict[str, Any]:
        raise NotImplementedError

    def stream_info(self, llm: Any, prompt: str) -> dict[str, Any]:
        raise NotImplementedError

    def count(self, llm: Any, text: str) -> int:
        raise NotImplementedError


class LangChainText(Framework):
    name, model, overflow, error = "langchain-llm", LangChainLLM, LangChainOverflow, ModelError

    def text(self, llm: Any, prompt: str, **options: Any) -> str:
        return llm.invoke(prompt, **options)

    async def atext(self, llm: Any, prompt: str, **options: Any) -> str:
        return await llm.ainvoke(prompt, **options)

    def deltas(self, llm: Any, prompt: str, **options: Any) -> Iterator[str]:
        yield from llm.stream(prompt, **options)

    async def adeltas(self, llm: Any, prompt: str, **options: Any) -> AsyncIterator[str]:
        async for delta in llm.astream(prompt, **options):
            yield delta

    def info(self, llm: Any, prompt: str) -> dict[str, Any]:
        return llm.generate([prompt]).generations[0][0].generation_info

    def stream_info(self, llm: Any, prompt: str) -> dict[str, Any]:
        chunks: list[GenerationChunk] = list(llm._stream(prompt))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert total.generation_info is not None
        return total.generation_info

    def count(self, llm: Any, text: str) -> int:
        return llm.get_num_tokens(text)


class LangChainChat(LangChainText):
    name, model = "langchain-chat", ChatTideKV

    def text(self, llm: Any, prompt: str, **options: Any) -> str:
        return llm.invoke(prompt, **options).text

    async def atext(self, llm: Any, prompt: str, **options: Any) -> str:
        return (await llm.ainvoke(prompt, **options)).text

    def deltas(self, llm: Any, prompt: str, **options: Any) -> Iterator[str]:
        for chunk in llm.stream(prompt, **options):
            yield chunk.text

    async def adeltas(self, llm: Any, prompt: str, **options: Any) -> AsyncIterator[str]:
        async for chunk in llm.astream(prompt, **options):
            yield chunk.text

    def info(self, llm: Any, prompt: str) -> dict[str, Any]:
        return llm.invoke(prompt).response_metadata

    def stream_info(self, llm: Any, prompt: str) -> dict[str, Any]:
        chunks = list(llm.stream(prompt))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        return total.response_metadata


class LlamaIndexText(Framework):
    name, model = "llama-index", LlamaIndexLLM

    def text(self, llm: Any, prompt: str, **options: Any) -> str:
        return llm.complete(prompt, **options).text

    async def atext(self, llm: Any, prompt: str, **options: Any) -> str:
        return (await llm.acomplete(prompt, **options)).text

    def deltas(self, llm: Any, prompt: str, **options: Any) -> Iterator[str]:
        for response in llm.stream_complete(prompt, **options):
            yield response.delta

    async def adeltas(self, llm: Any, prompt: str, **options: Any) -> AsyncIterator[str]:
        async for response in await llm.astream_complete(prompt, **options):
            yield response.delta

    def info(self, llm: Any, prompt: str) -> dict[str, Any]:
        return llm.complete(prompt).raw

    def stream_info(self, llm: Any, prompt: str) -> dict[str, Any]:
        return list(llm.stream_complete(prompt))[-1].raw

    def count(self, llm: Any, text: str) -> int:
        return len(llm.tokenize(text))


FRAMEWORKS: tuple[Framework, ...] = (LangChainText(), LangChainChat(), LlamaIndexText())
