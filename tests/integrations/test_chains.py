"""What users compose of a document chain: histories, pipes, parallel runs, batches, events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.exceptions import ModelError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory

from langchain_tidekv import ChatTideKV, TideKVLLM, stuff_documents_chain
from langchain_tidekv.documents import StuffDocumentsChain

PAGES = [
    Document(page_content="The tower is 41 metres high.", metadata={"source": "a.pdf", "page": 0}),
    Document(page_content="Anna keeps the light.", metadata={"source": "a.pdf", "page": 1}),
]
VALUE = {"context": PAGES, "question": "How high?"}
# LangChain advises another package for this; it is still what people compose.
HISTORY = pytest.mark.filterwarnings("ignore::langchain_core._api.deprecation.LangChainDeprecationWarning")
KINDS = pytest.mark.parametrize("kind", [TideKVLLM, ChatTideKV])
CONFIG: Any = {"configurable": {"session_id": "s"}}


async def drained(parts: Any) -> list[Any]:
    return [part async for part in parts]


def total(parts: list[Any]) -> Any:
    added = parts[0]
    for part in parts[1:]:
        added = added + part
    return added


def remembering(chain: Any, **keys: str) -> tuple[Any, InMemoryChatMessageHistory]:
    store = InMemoryChatMessageHistory()
    options = {"input_messages_key": "question", "output_messages_key": "answer", **keys}
    return RunnableWithMessageHistory(chain, lambda session_id: store, **options), store


@HISTORY
@KINDS
@pytest.mark.parametrize("keys", [{"history_messages_key": "history"}, {}], ids=["history", "one-list"])
def test_a_history_grows_however_the_chain_is_run(kind: Any, keys: dict[str, str], tiny: str) -> None:
    """Streams that start no run of the chain end none: nothing was remembered of them."""
    with kind(model=tiny, max_tokens=4) as llm:
        chain, store = remembering(stuff_documents_chain(llm), **keys)
        lengths = []
        for run in (
            lambda: chain.invoke(VALUE, CONFIG),
            lambda: list(chain.stream(VALUE, CONFIG)),
            lambda: asyncio.run(drained(chain.astream(VALUE, CONFIG))),
            lambda: asyncio.run(chain.ainvoke(VALUE, CONFIG)),
        ):
            run()
            lengths.append(len(store.messages))
        assert lengths == [2, 4, 6, 8]
        assert [message.type for message in store.messages] == ["human", "ai"] * 4
        assert all(len(message.text) == 4 for message in store.messages[1::2])


class Runs(BaseCallbackHandler):
    """Names of the runs that began, each with its parent's, and how they ended."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.begun: list[tuple[str, str | None]] = []
        self.outputs: list[Any] = []

    def _begin(self, serialized: Any, run_id: Any, parent_run_id: Any, **kwargs: Any) -> None:
        self.names[run_id] = kwargs.get("name") or "model"
        self.begun.append((self.names[run_id], self.names.get(parent_run_id)))

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: Any, parent_run_id: Any = None, **kw: Any
    ) -> None:
        self._begin(serialized, run_id, parent_run_id, **kw)

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: Any, parent_run_id: Any = None, **kw: Any) -> None:
        self._begin(serialized, run_id, parent_run_id, name="model")

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, run_id: Any, parent_run_id: Any = None, **kw: Any
    ) -> None:
        self._begin(serialized, run_id, parent_run_id, name="model")

    def on_chain_end(self, outputs: Any, **kwargs: Any) -> None:
        self.outputs.append(outputs)


@KINDS
def test_every_way_to_run_it_is_one_run_of_the_chain_with_the_model_in_it(kind: Any, tiny: str) -> None:
    expected = [(StuffDocumentsChain.__name__, None), ("model", StuffDocumentsChain.__name__)]
    with kind(model=tiny, max_tokens=4) as llm:
        chain = stuff_documents_chain(llm)
        answer = chain.invoke(VALUE)["answer"]
        for run in (
            lambda config: chain.invoke(VALUE, config),
            lambda config: list(chain.stream(VALUE, config)),
            lambda config: asyncio.run(drained(chain.astream(VALUE, config))),
            lambda config: chain.batch([VALUE], config),
        ):
            seen = Runs()
            run({"callbacks": [seen]})
            assert seen.begun == expected
            assert [output["answer"] for output in seen.outputs] == [answer]


@KINDS
def test_pipes_parallels_and_batches_give_what_the_chain_gives(kind: Any, tiny: str) -> None:
    with kind(model=tiny, max_tokens=4) as llm:
        chain = stuff_documents_chain(llm)
        whole = chain.invoke(VALUE)
        piped = RunnablePassthrough.assign(context=lambda _: PAGES) | chain
        assert total(list(piped.stream({"question": "How high?"})))["answer"] == whole["answer"]
        assert total(asyncio.run(drained(piped.astream({"question": "How high?"}))))["pages"] == whole["pages"]
        fed = RunnableParallel(context=RunnableLambda(lambda _: PAGES), question=RunnablePassthrough()) | chain
        assert total(list(fed.stream("How high?")))["answer"] == whole["answer"]
        both = RunnableParallel(one=chain, two=chain)
        assert {both.invoke(VALUE)[name]["answer"] for name in ("one", "two")} == {whole["answer"]}
        parts = total(list(both.stream(VALUE)))
        assert parts["one"]["answer"] == parts["two"]["answer"] == whole["answer"]
        assert [one["answer"] for one in chain.batch([VALUE, VALUE])] == [whole["answer"]] * 2
        assert [one["answer"] for one in asyncio.run(chain.abatch([VALUE, VALUE]))] == [whole["answer"]] * 2
        assert (chain | RunnableLambda(lambda found: found["answer"])).invoke(VALUE) == whole["answer"]


def test_events_of_a_stream_name_the_chain_and_the_model(tiny: str) -> None:
    async def events(chain: Any) -> list[str]:
        return [f"{event['event']} {event['name']}" async for event in chain.astream_events(VALUE, version="v2")]

    with ChatTideKV(model=tiny, max_tokens=4) as chat:
        seen = asyncio.run(events(stuff_documents_chain(chat)))
    assert seen[0] == "on_chain_start StuffDocumentsChain"
    assert seen[-1] == "on_chain_end StuffDocumentsChain"
    assert "on_chat_model_start ChatTideKV" in seen and "on_chain_stream StuffDocumentsChain" in seen


def test_an_answer_of_nothing_is_an_answer(tiny: str) -> None:
    with TideKVLLM(model=tiny, max_tokens=4) as llm:
        first = stuff_documents_chain(llm).invoke(VALUE)["answer"][0]
        assert total(list(stuff_documents_chain(llm.bind(stop=[first])).stream(VALUE)))["answer"] == ""


# --- histories ----------------------------------------------------------------------------------------------

TURNS = [("Who?", "Anna."), ("Where?", "Here.")]


def request_of(chain: Any, history: Any, question: Any = "How high?") -> Any:
    prompt = chain._prompt({"context": PAGES, "question": question, "history": history}, None)
    return prompt.message.request


@pytest.fixture
def chain(tiny: str) -> Any:
    return stuff_documents_chain(TideKVLLM(model=tiny), instructions="Be exact.")


@pytest.mark.parametrize(
    "history",
    [
        TURNS,
        [list(turn) for turn in TURNS],
        [message for asked, told in TURNS for message in (HumanMessage(asked), AIMessage(told))],
        [message for asked, told in TURNS for message in (("human", asked), ("ai", told))],
        [
            {"role": role, "content": text}
            for turn in TURNS
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ],
        iter(TURNS),
    ],
    ids=["pairs", "lists", "messages", "roles-and-texts", "dicts", "iterator"],
)
def test_a_history_in_every_form_is_the_same(chain: Any, history: Any) -> None:
    request = request_of(chain, history)
    assert request.history == tuple(TURNS)
    assert request.instructions == "Be exact."


def test_system_text_joins_the_instructions_and_is_no_question(chain: Any) -> None:
    request = request_of(chain, [SystemMessage("In French."), HumanMessage("Who?"), AIMessage("Anna.")])
    assert request.history == (("Who?", "Anna."),)
    assert request.instructions == "Be exact.\n\nIn French."


def test_calls_of_tools_and_neighbours_are_one_turn(chain: Any) -> None:
    call = AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "1"}])
    history = [HumanMessage("2+2?"), call, ToolMessage("4", tool_call_id="1"), AIMessage("It is 4.")]
    assert request_of(chain, history).history == (("2+2?\n\n4", "It is 4."),)


def test_a_question_that_is_a_conversation_is_taken_apart(chain: Any) -> None:
    request = request_of(chain, [], [HumanMessage("Who?"), AIMessage("Anna."), HumanMessage("How high?")])
    assert (request.history, request.question) == ((("Who?", "Anna."),), "How high?")


@pytest.mark.parametrize(
    ("history", "says"),
    [
        ([SystemMessage("s"), HumanMessage("q"), AIMessage("a"), HumanMessage("r")], r"history\[3\] is a question"),
        ([SystemMessage("s"), AIMessage("Hello!"), HumanMessage("q"), AIMessage("a")], r"history\[1\] is an answer"),
        ("Hi", "history must be"),
        (["Hi"], "history must be"),
        ([("a", "b", "c")], "history must be"),
        ([{"text": "x"}], "history must be"),
        (5, "history must be"),
    ],
    ids=str,
)
def test_a_history_that_cannot_be_paired_names_the_message(chain: Any, history: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        chain.invoke({"context": PAGES, "question": "How high?", "history": history})


@HISTORY
def test_a_chain_of_langchains_own_streams_through_the_model(tiny: str) -> None:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder

    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use this:\n{context}"), MessagesPlaceholder("history", optional=True), ("human", "{input}")]
    )
    with ChatTideKV(model=tiny, max_tokens=4) as chat:
        inner = create_stuff_documents_chain(chat, prompt)
        keys = {"input_messages_key": "input", "history_messages_key": "history"}
        store = InMemoryChatMessageHistory()
        remembered = RunnableWithMessageHistory(inner, lambda session_id: store, **keys)
        value = {"context": PAGES, "input": "How high?"}
        assert len(remembered.invoke(value, CONFIG)) == 4
        assert len("".join(remembered.stream(value, CONFIG))) == 4
        assert len("".join(asyncio.run(drained(remembered.astream(value, CONFIG))))) == 4
        assert len(store.messages) == 6
