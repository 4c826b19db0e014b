"""What only LlamaIndex has: query engines, synthesizers, chat engines, its own serialisation and callbacks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, SummaryIndex
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage, ImageBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.tidekv import TideKVLLM, WholeDocumentQueryEngine, configure_settings, load_pdf
from tests.documents.pdf_writer import text_pdf
from tidekv_llm.errors import ConfigError, ContextOverflowError, DocumentNotFoundError

NODES = [
    TextNode(text="The tower is 41 metres high.", metadata={"file_name": "a.pdf", "page_label": "iv"}),
    TextNode(text="Anna keeps the light.", metadata={"file_name": "a.pdf", "page_label": "v"}),
]


@pytest.fixture
def llm(tiny: str) -> Iterator[TideKVLLM]:
    with TideKVLLM(model=tiny, max_tokens=6) as made:
        yield made


@pytest.fixture
def settings(llm: TideKVLLM) -> Iterator[None]:
    before = (Settings._llm, Settings._prompt_helper, Settings._chat_prompt_helper)
    configure_settings(llm)
    yield
    Settings._llm, Settings._prompt_helper, Settings._chat_prompt_helper = before
    Settings.tokenizer = None


def test_stream_and_whole_are_the_same(llm: TideKVLLM) -> None:
    messages = [ChatMessage(role="user", content="Hi")]

    async def all_async() -> list[str]:
        chunks = [chunk async for chunk in await llm.astream_chat(messages)]
        return [(await llm.achat(messages)).message.content or "", chunks[-1].message.content or ""]

    whole = llm.chat(messages)
    last = list(llm.stream_chat(messages))[-1]
    assert whole.message.content == last.message.content == llm.complete("Hi").text
    assert set(asyncio.run(all_async())) == {whole.message.content}
    assert whole.raw["usage"] == last.raw["usage"]
    json.dumps([whole.raw, whole.additional_kwargs])


def test_prompt_functions_and_formatted_prompts_are_sent_as_they_are(tiny: str) -> None:
    llm = TideKVLLM(model=tiny, max_tokens=2, completion_to_prompt=lambda text: f"<<{text}>>")
    assert llm.complete("Hi").raw["usage"]["prompt_tokens"] == len("<<Hi>>") + 1
    assert llm.complete("Hi", formatted=True).raw["usage"]["prompt_tokens"] == len("Hi") + 1
    assert list(llm.stream_complete("Hi"))[-1].raw["usage"]["prompt_tokens"] == len("<<Hi>>") + 1
    llm.close()


def test_constructor_options_hold_in_predict(tiny: str) -> None:
    """predict() and stream() forward no keywords."""
    with TideKVLLM(model=tiny, max_tokens=8) as llm:
        whole = llm.predict(PromptTemplate("Hi {name}"), name="Anna")
    with TideKVLLM(model=tiny, max_tokens=8, stop=[whole[3:5]]) as llm:
        assert llm.predict(PromptTemplate("Hi {name}"), name="Anna") == whole[: whole.find(whole[3:5])]
        assert "".join(llm.stream(PromptTemplate("Hi {name}"), name="Anna")) == whole[: whole.find(whole[3:5])]


def test_token_counting_handler_sees_the_real_counts(tiny: str) -> None:
    counter = TokenCountingHandler(tokenizer=list)
    with TideKVLLM(model=tiny, max_tokens=6, callback_manager=CallbackManager([counter])) as llm:
        usage = llm.chat([ChatMessage(role="user", content="Hi")]).raw["usage"]
    assert counter.completion_llm_token_count == 6
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]


def test_serialises_by_name(llm: TideKVLLM) -> None:
    data = json.loads(llm.to_json())
    assert data["model"] == llm.model
    assert "engine" not in data
    assert TideKVLLM.from_dict(data).complete("Hi").text == llm.complete("Hi").text


def test_pictures_are_refused(llm: TideKVLLM) -> None:
    with pytest.raises(ConfigError, match="read text only"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(image=b"abc")])])


# --- documents ----------------------------------------------------------------------------------------------


def test_query_engine_answers_in_every_way(llm: TideKVLLM) -> None:
    response = WholeDocumentQueryEngine(llm, NODES).query("How high is the tower?")
    assert [page["page_label"] for page in response.metadata["pages"]["included"]] == ["iv", "v"]
    json.dumps(response.metadata)
    again = asyncio.run(WholeDocumentQueryEngine(llm, NODES).aquery("How high is the tower?"))
    assert str(again) == str(response)
    streaming = WholeDocumentQueryEngine(llm, NODES, streaming=True)
    streamed = streaming.query("How high is the tower?")
    assert "".join(streamed.response_gen) == str(response)
    assert streamed.metadata["pages"] == response.metadata["pages"]

    async def consume() -> str:
        streamed = await streaming.aquery("How high is the tower?")
        return "".join([delta async for delta in streamed.response_gen])

    assert asyncio.run(consume()) == str(response)


@pytest.mark.usefixtures("embedded_model_path")
def test_cited_pages_are_source_nodes() -> None:
    with TideKVLLM(max_tokens=16) as llm:
        response = WholeDocumentQueryEngine(llm, NODES).query("How high is the tower?")
    assert "41" in str(response)
    assert [found.node for found in response.source_nodes] == [NODES[0]]
    assert response.metadata["citations"][0]["verified"]


def test_overflow(llm: TideKVLLM) -> None:
    texts = [f"{'gulls' if n == 9 else n} " + "x" * 200 for n in range(14)]
    nodes = [TextNode(text=text, metadata={"page_label": str(n)}) for n, text in enumerate(texts)]
    with pytest.raises(ContextOverflowError, match="would fit"):
        WholeDocumentQueryEngine(llm, nodes).query("What of the gulls?")
    found = WholeDocumentQueryEngine(llm, nodes, overflow="retrieve").query("What of the gulls?").metadata["pages"]
    assert "9" in [page["page_label"] for page in found["included"]]
    assert found["left_out"]

    class Mine(BaseRetriever):
        def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
            return [NodeWithScore(node=nodes[5]), NodeWithScore(node=nodes[1])]

    engine = WholeDocumentQueryEngine(llm, nodes, overflow="retrieve", retriever=Mine())
    included = engine.query("What?").metadata["pages"]["included"]
    assert [page["page_label"] for page in included] == ["1", "5"]


def test_bad_engines(llm: TideKVLLM) -> None:
    with pytest.raises(ConfigError, match="empty"):
        WholeDocumentQueryEngine(llm, [])
    with pytest.raises(ConfigError, match="needs a TideKVLLM"):
        WholeDocumentQueryEngine("gpt", NODES)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="overflow='cut'"):
        WholeDocumentQueryEngine(llm, NODES, overflow="cut")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="question is empty"):
        WholeDocumentQueryEngine(llm, NODES).query("  ")


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
def test_summary_index_is_one_call_when_it_fits(llm: TideKVLLM, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = TideKVLLM._chat_call
    monkeypatch.setattr(TideKVLLM, "_chat_call", lambda *given: calls.append(given[1]) or real(*given))
    assert str(SummaryIndex(nodes=NODES).as_query_engine(response_mode=mode).query("How high?"))
    assert len(calls) == 1
    assert all(node.text in str(calls[0]) for node in NODES)


@pytest.mark.usefixtures("settings")
def test_retriever_query_engine_and_chat_engine(llm: TideKVLLM) -> None:
    retriever = SummaryIndex(nodes=NODES).as_retriever()
    assert str(RetrieverQueryEngine.from_args(retriever, llm=llm).query("How high?"))
    chat = SimpleChatEngine.from_defaults(
        llm=llm, system_prompt="Be kind.", memory=ChatMemoryBuffer.from_defaults(llm=llm)
    )
    assert str(chat.chat("Hi"))
    assert "".join(chat.stream_chat("And now?").response_gen)


def test_three_invoices_of_one_name_stay_three_documents(llm: TideKVLLM, tmp_path: Path) -> None:
    pages = []
    for number in (1, 2, 3):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "invoice.pdf"
        path.write_bytes(text_pdf([f"Invoice {number}."], [f"Total {number}00."]))
        pages += load_pdf(path)
    nodes = SentenceSplitter(chunk_size=64, chunk_overlap=0).get_nodes_from_documents(pages)
    for given in (pages, nodes):
        included = WholeDocumentQueryEngine(llm, given).query("What is the total?").metadata["pages"]["included"]
        assert [(page["document"], page["page_label"]) for page in included] == [
            (name, label) for name in ("invoice.pdf", "invoice.pdf (2)", "invoice.pdf (3)") for label in ("1", "2")
        ]


def test_pdf_pages_have_the_usual_metadata() -> None:
    pages = load_pdf("examples/lighthouse.pdf", pages="1-2")
    place = {"file_name": "lighthouse.pdf", "file_path": "examples/lighthouse.pdf"}
    assert [page.metadata for page in pages] == [{**place, "page_label": "i"}, {**place, "page_label": "1"}]
    assert all("examples" not in page.get_content(metadata_mode=mode) for page in pages for mode in ("llm", "embed"))
    with pytest.raises(DocumentNotFoundError):
        load_pdf("nowhere.pdf")
