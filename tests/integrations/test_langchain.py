"""What only LangChain has: LCEL, chains, callbacks, caches, batches, configurable fields, structured output."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError, ModelError, ModelInvalidRequestError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel
from pydantic import BaseModel

from langchain_tidekv import ChatTideKV, TideKVLLM, load_pdf, stuff_documents_chain

PAGES = [
    Document(page_content="The tower is 41 metres high.", metadata={"source": "a.pdf", "page": 0, "page_label": "iv"}),
    Document(page_content="Anna keeps the light.", metadata={"source": "a.pdf", "page": 1}),
    Document(page_content="No metadata at all."),
]
KINDS = pytest.mark.parametrize("kind", [TideKVLLM, ChatTideKV])


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ended = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        assert kwargs["chunk"] is not None
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.ended += 1


class AsyncTokens(AsyncCallbackHandler, Tokens):
    async def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:  # type: ignore[override]
        Tokens.on_llm_new_token(self, token, **kwargs)

    async def on_llm_end(self, response: Any, **kwargs: Any) -> None:  # type: ignore[override]
        Tokens.on_llm_end(self, response, **kwargs)


@KINDS
def test_stream_calls_back_before_each_delta(kind: Any, tiny: str) -> None:
    seen, aseen = Tokens(), AsyncTokens()

    async def consume() -> None:
        async for _ in llm.astream("Hi", {"callbacks": [aseen]}):
            pass

    with kind(model=tiny, max_tokens=6) as llm:
        deltas = []
        for delta in llm.stream("Hi", {"callbacks": [seen]}):
            deltas.append(getattr(delta, "text", delta))
            assert len(seen.tokens) == len(deltas)
        asyncio.run(consume())
    assert "".join(seen.tokens) == "".join(aseen.tokens) == "".join(deltas)
    assert (seen.ended, aseen.ended) == (1, 1)


@KINDS
def test_batch_returns_exceptions_one_by_one(kind: Any, tiny: str) -> None:
    with kind(model=tiny, max_tokens=4) as llm:
        prompts = ["Hi", "x" * 3000, "Ho"]
        for answers in (
            llm.batch(prompts, return_exceptions=True),
            asyncio.run(llm.abatch(prompts, return_exceptions=True)),
        ):
            assert isinstance(answers[1], ContextOverflowError)
            assert not isinstance(answers[0], Exception)
            assert answers[2] == llm.invoke("Ho") or kind is ChatTideKV
        with pytest.raises(ContextOverflowError):
            llm.batch(prompts)


def test_usage_survives_for_every_item_of_a_batch(tiny: str) -> None:
    with TideKVLLM(model=tiny, max_tokens=4) as llm:
        result = llm.generate(["Hi", "Hello there"])
    each = [generation[0].generation_info["token_usage"]["prompt_tokens"] for generation in result.generations]
    assert each[0] < each[1]
    assert result.llm_output["token_usage"]["prompt_tokens"] == sum(each)


def test_chat_prompt_into_llm_keeps_the_roles(tiny: str) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be kind."), ("human", "{text}")])
    with TideKVLLM(model=tiny, max_tokens=6) as llm, ChatTideKV(model=tiny, max_tokens=6) as chat:
        expected = (prompt | chat | StrOutputParser()).invoke({"text": "Hi"})
        chain = prompt | llm
        assert chain.invoke({"text": "Hi"}) == expected
        assert "".join(chain.stream({"text": "Hi"})) == expected
        assert asyncio.run(chain.ainvoke({"text": "Hi"})) == expected
        assert llm.invoke(prompt.invoke({"text": "Hi"}).to_messages()) == expected
        assert llm.invoke(prompt.invoke({"text": "Hi"}).to_string()) != expected  # one user turn, other tokens


def test_configurable_fields_load_nothing_again(tiny: str) -> None:
    with TideKVLLM(model=tiny, max_tokens=4) as llm:
        model = llm.engine_handle().engine().model
        runnable = llm.configurable_fields(max_tokens=ConfigurableField(id="most"))
        assert len(runnable.invoke("Hi", {"configurable": {"most": 2}})) == 2
        assert len(runnable.invoke("Hi")) == 4
        assert llm.engine_handle().engine().model is model
        assert len(llm.bind(max_tokens=3).invoke("Hi")) == 3


def test_repr_and_traces_are_short_and_plain(tiny: str) -> None:
    with TideKVLLM(model=tiny, kept_tokens=64) as llm:
        assert len(repr(llm)) < 1000
        json.dumps(llm.asdict())
        assert not llm.engine_handle().loaded


def test_content_that_is_not_text_is_refused(tiny: str) -> None:
    picture = HumanMessage(content=[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])
    with ChatTideKV(model=tiny, max_tokens=4) as chat:
        with pytest.raises(ModelInvalidRequestError, match="read text only"):
            chat.invoke([picture])
        assert chat.invoke([HumanMessage("2+2?"), AIMessage("calling"), ToolMessage("4", tool_call_id="1")]).text


def test_messages_are_counted_as_the_model_gets_them(tiny: str) -> None:
    messages = [HumanMessage("Hi")]
    with ChatTideKV(model=tiny, max_tokens=4) as chat:
        assert chat.get_num_tokens_from_messages(messages) == chat.invoke(messages).usage_metadata["input_tokens"]


class Tower(BaseModel):
    """A tower."""

    metres: int


@pytest.mark.parametrize("text", ['{"metres": 41}', 'Here:\n```json\n{"metres": 41}\n```'])
def test_structured_output_parses(text: str, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidekv_llm.metrics import Metrics
    from tidekv_llm.service import Reply

    monkeypatch.setattr("langchain_tidekv.chat.run", lambda *_: Reply(text, "stop", Metrics(), "tiny"))
    chat = ChatTideKV(model=tiny)
    assert chat.with_structured_output(Tower).invoke("How high?") == Tower(metres=41)
    assert chat.with_structured_output(Tower.model_json_schema()).invoke("How high?") == {"metres": 41}
    assert chat.with_structured_output(Tower, include_raw=True).invoke("How high?")["parsed"] == Tower(metres=41)


def test_structured_output_says_what_failed(tiny: str) -> None:
    with ChatTideKV(model=tiny, max_tokens=4) as chat:
        found = chat.with_structured_output(Tower, include_raw=True).invoke("How high?")
    assert found["parsed"] is None
    assert isinstance(found["parsing_error"], ValueError)


# --- documents ----------------------------------------------------------------------------------------------


@KINDS
def test_chain_answers_in_every_way(kind: Any, tiny: str) -> None:
    value = {"context": PAGES, "question": "How high is the tower?"}
    seen = Tokens()
    with kind(model=tiny, max_tokens=6) as llm:
        chain = stuff_documents_chain(llm)
        result = chain.invoke(value, {"callbacks": [seen]})
        assert seen.ended == 1
        assert [page["page_label"] for page in result["pages"]["included"]] == ["iv", "2", "1"]
        assert asyncio.run(chain.ainvoke(value))["answer"] == result["answer"]
        parts = list(chain.stream(value))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert total["answer"] == result["answer"]
        assert total["pages"] == result["pages"]
        assert len(stuff_documents_chain(llm.bind(max_tokens=2)).invoke(value)["answer"]) == 2
        both = RunnableParallel(whole=chain, length=RunnableLambda(lambda given: len(given["context"])))
        assert both.invoke(value)["length"] == 3
    json.dumps(result)


def test_citations_are_checked(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidekv_llm.documents import build_prompt, cite_pages
    from tidekv_llm.engine import TideKV
    from tidekv_llm.metrics import Metrics

    written = 'It is "41 metres high" [a.pdf p. iv]. "Anna sells the light" [a.pdf p. 2].'

    def ask(self: TideKV, documents: Any, question: str, **options: Any) -> SimpleNamespace:
        prompt = build_prompt(documents, question, self.tokenizer)
        found = cite_pages(written, prompt, documents)
        return SimpleNamespace(
            text=written, citations=found, metrics=Metrics(), finish_reason="stop", warnings=(), reasoning=""
        )

    monkeypatch.setattr(TideKV, "ask", ask)
    with TideKVLLM(model=tiny) as llm:
        found = stuff_documents_chain(llm).invoke({"context": PAGES, "input": "How high?"})["citations"]
    by_label = {citation["page_label"]: citation for citation in found}
    assert by_label["iv"]["verified"]
    assert by_label["iv"]["items"] == [0]
    assert by_label["iv"]["source"] == "a.pdf"
    assert not by_label["2"]["verified"]


class Ranked(BaseRetriever):
    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


def test_retriever_ranks_and_feeds(tiny: str) -> None:
    pages = [Document(page_content=f"{n} " + "x" * 200, metadata={"source": "b", "page": n}) for n in range(14)]
    with TideKVLLM(model=tiny, max_tokens=4) as llm:
        chain = stuff_documents_chain(llm, overflow="retrieve", retriever=Ranked(documents=[pages[9], pages[2]]))
        result = chain.invoke({"context": pages, "question": "Which?"})
        assert [page["page_label"] for page in result["pages"]["included"]] == ["3", "10"]
        fed = {"context": Ranked(documents=pages[:2]), "question": RunnableLambda(str)} | stuff_documents_chain(llm)
        assert len(fed.invoke("Which?")["pages"]["included"]) == 2


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"context": [], "question": "Who?"}, "no document"),
        ({"context": PAGES, "question": " "}, "question is empty"),
        ({"context": PAGES}, "pass the question"),
        ({"context": ["text"], "question": "Who?"}, "holds a str"),
        ({"context": PAGES, "question": "Who?", "history": ["Hi"]}, "history"),
    ],
)
def test_bad_chain_input(tiny: str, value: dict[str, Any], says: str) -> None:
    chain = stuff_documents_chain(TideKVLLM(model=tiny))
    with pytest.raises(ModelError, match=says):
        chain.invoke(value)


def test_chain_needs_our_model_and_the_window_holds(tiny: str) -> None:
    with pytest.raises(ModelInvalidRequestError, match="needs a TideKVLLM"):
        stuff_documents_chain(RunnableLambda(str))
    with ChatTideKV(model=tiny) as chat, pytest.raises(ContextOverflowError, match="would fit"):
        stuff_documents_chain(chat).invoke({"context": [Document("x" * 1500), Document("y" * 900)], "question": "?!"})


def test_langchains_own_stuff_chain_works(tiny: str) -> None:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {input}")
    with TideKVLLM(model=tiny, max_tokens=4) as llm:
        assert len(create_stuff_documents_chain(llm, prompt).invoke({"context": PAGES, "input": "How high?"})) == 4


def test_pdf_pages_have_the_usual_metadata() -> None:
    pages = load_pdf("examples/lighthouse.pdf", pages="1-2")
    assert [page.metadata["page_label"] for page in pages] == ["i", "1"]
    assert [page.metadata["page"] for page in pages] == [0, 1]
    with pytest.raises(ModelInvalidRequestError, match="no file"):
        load_pdf("nowhere.pdf")
