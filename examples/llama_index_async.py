"""LlamaIndex: two answers at once on an event loop that stays free, streamed.

pip install "tidekv-llm[llama-index]"
python examples/llama_index_async.py
"""

import asyncio

from llama_index.core.llms import ChatMessage

from llama_index.llms.tidekv import TideKVLLM

QUESTIONS = ("What is the capital of Japan?", "What is the capital of Greece?")


async def answer(llm: TideKVLLM, question: str) -> None:
    text = ""
    async for chunk in await llm.astream_chat([ChatMessage(role="user", content=question)]):
        text += chunk.delta or ""
    print(f"{question} {text}")


async def main() -> None:
    with TideKVLLM(model="smollm2-135m", max_tokens=32) as llm:
        await asyncio.gather(*(answer(llm, question) for question in QUESTIONS))


if __name__ == "__main__":
    asyncio.run(main())
