"""Batches and gathered queries about the same documents are answered in one turn, as one by one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig
from llama_index.core.schema import TextNode

from langchain_tidekv import ChatTideKV, TideKVLLM, stuff_documents_chain
from llama_index.llms.tidekv import TideKVLLM as LlamaIndexLLM
from llama_index.llms.tidekv import WholeDocumentQueryEngine
from tidekv_llm.engine import TideKV
from tidekv_llm.service.joining import Companions

PAGES = [Document(page_content="The tower is 41 metres high. " * 4, metadata={"source": "a.pdf", "page": 0})]
QUESTIONS = ["How high?", "Which tower?", "Who?", "And why is that so?"]
INPUTS = [{"context": PAGES, "question": question} for question in QUESTIONS]
KINDS = pytest.mark.parametrize("kind", [TideKVLLM, ChatTideKV])


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many questions each joint turn had; the first turn waits until all have come."""
    sizes: list[int] = []
    ask_many, claim = TideKV.ask_many, Companions.claim

    def counted(engine: TideKV, documents: Any, questions: Any, **options: Any) -> Any:
        sizes.append(len(questions))
        return ask_many(engine, documents, questions, **options)

    def patient(companions: Companions, waiter: Any) -> Any:
        while not sizes and len(companions._waiting) < expected[0]:
            time.sleep(0.001)
        return claim(companions, waiter)

    expected = [len(QUESTIONS)]
    monkeypatch.setattr(TideKV, "ask_many", counted)
    monkeypatch.setattr(Companions, "claim", patient)
    return sizes


def alone(chain: Any) -> list[Any]:
    """Streams are never joined."""
    found = []
    for value in INPUTS:
        parts = list(chain.stream(value))
        added = parts[0]
        for part in parts[1:]:
            added = added + part
        found.append(added["answer"])
    return found


@KINDS
@pytest.mark.parametrize("way", ["batch", "abatch"])
def test_a_chains_batch_is_one_turn(kind: Any, way: str, tiny: str, batches: list[int]) -> None:
    with kind(model=tiny, dtype="float32", max_tokens=8) as llm:
        chain = stuff_documents_chain(llm)
        config = RunnableConfig(max_concurrency=len(QUESTIONS))
        answers = chain.batch(INPUTS, config) if way == "batch" else asyncio.run(chain.abatch(INPUTS, config))
        assert batches == [len(QUESTIONS)]
        assert [answer["answer"] for answer in answers] == alone(chain)
        assert all(answer["pages"]["included"] for answer in answers)


def test_gathered_queries_are_one_turn(tiny: str, batches: list[int]) -> None:
    with LlamaIndexLLM(model=tiny, dtype="float32", max_tokens=8) as llm:
        asked = WholeDocumentQueryEngine(llm, [TextNode(text=PAGES[0].page_content)])

        async def gathered() -> list[Any]:
            return await asyncio.gather(*(asked.aquery(question) for question in QUESTIONS))

        answers = [str(response) for response in asyncio.run(gathered())]
        assert batches == [len(QUESTIONS)]
        streaming = WholeDocumentQueryEngine(llm, [TextNode(text=PAGES[0].page_content)], streaming=True)
        assert answers == ["".join(streaming.query(question).response_gen) for question in QUESTIONS]


def test_one_that_fails_leaves_the_others_alone(tiny: str, batches: list[int]) -> None:
    with TideKVLLM(model=tiny, dtype="float32", max_tokens=8) as llm:
        chain = stuff_documents_chain(llm)
        inputs = [*INPUTS[:3], {"context": PAGES, "question": "x" * 5000}]
        config = RunnableConfig(max_concurrency=len(inputs))
        *answers, failed = chain.batch(inputs, config, return_exceptions=True)
        assert batches == [3]
        assert isinstance(failed, Exception) and "5," in str(failed)
        assert [answer["answer"] for answer in answers] == alone(chain)[:3]


def test_other_documents_and_other_options_are_not_joined(tiny: str) -> None:
    from tidekv_llm.documents.loaded import LoadedItem, corpus_of
    from tidekv_llm.service import DocumentRequest, call_options, document_call

    defaults = {"max_tokens": 8, "stop": [], "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}
    first, second = (corpus_of([LoadedItem(text, {})]) for text in ("one", "two"))
    options, longer = call_options(defaults, None, {}), call_options(defaults, None, {"max_tokens": 9})
    call: Any = document_call(DocumentRequest(first, "Why?"), options)
    same: Any = document_call(DocumentRequest(first, "Who?"), options)
    assert call.joins(same)
    others: list[Any] = [
        document_call(DocumentRequest(second, "Why?"), options),
        document_call(DocumentRequest(first, "Why?"), longer),
        document_call(DocumentRequest(first, "Why?", history=(("a", "b"),)), options),
        document_call(DocumentRequest(first, "Why?", instructions="Be brief."), options),
    ]
    assert not any(call.joins(other) or other.joins(call) for other in others)
