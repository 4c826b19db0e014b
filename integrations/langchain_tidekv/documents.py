"""stuff_documents_chain: whole pages into the prompt, an answer with page citations out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.outputs import LLMResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig, patch_config
from langchain_core.runnables.utils import AddableDict

from langchain_tidekv.chat import ChatTideKV
from langchain_tidekv.errors import langchain_errors
from langchain_tidekv.llm import TideKVLLM
from langchain_tidekv.prompts import DocumentMessage, DocumentPrompt, roles_and_texts, text_of
from tidekv_llm.documents import DEFAULT_INSTRUCTIONS
from tidekv_llm.documents.loaded import LoadedItem, corpus_of
from tidekv_llm.errors import ConfigError
from tidekv_llm.service import DocumentRequest, Overflow, paired_turns

_QUESTION_KEYS = ("question", "input", "query")
_MESSAGE_ROLES = ("human", "user", "ai", "assistant", "system", "developer", "tool", "function")
_BAD_HISTORY = "history must be (question, answer) pairs, or messages that LangChain can read"
_REPORTED = ("citations", "pages", "warnings", "finish_reason", "token_usage", "tidekv")


def stuff_documents_chain(
    llm: TideKVLLM | ChatTideKV | Runnable[Any, Any],
    *,
    instructions: str | None = None,
    overflow: Overflow = "error",
    retriever: BaseRetriever | None = None,
    document_key: str = "context",
    question_key: str | None = None,
) -> StuffDocumentsChain:
    """A chain that answers questions from whole documents.

    Its input is ``{"context": [Document, ...], "question": "..."}``, optionally with ``"history"``: (question,
    answer) pairs or messages. Its output is a dict: ``answer``, ``reasoning``, ``citations`` (source, page label,
    quote, verified), ``pages`` (what went in, what did not, with tokens), ``warnings``, ``token_usage``, ``tidekv``.

    Args:
        llm: a TideKV model, or one with bound options (``llm.bind(max_tokens=32)``).
        instructions: what the model should do with the documents.
        overflow: what happens when the documents exceed the window: ``"error"``, or ``"retrieve"``, which keeps
            the pages that have most to do with the question, in reading order.
        retriever: ranks the pages instead of BM25.
        document_key: where the documents are in the input.
        question_key: where the question is; default: the first of question, input, query.

    Raises:
        TideKVInvalidRequestError: another kind of model, or an unknown ``overflow``.
    """
    with langchain_errors():
        bound, options = _unwrap(llm)
        if overflow not in ("error", "retrieve"):
            raise ConfigError(f"overflow={overflow!r} is unknown; choose 'error' or 'retrieve'")
    return StuffDocumentsChain(bound, options, instructions, overflow, retriever, document_key, question_key)


def _unwrap(llm: Any) -> tuple[TideKVLLM | ChatTideKV, dict[str, Any]]:
    options: dict[str, Any] = {}
    while isinstance(llm, RunnableBinding):
        options = {**llm.kwargs, **options}
        llm = llm.bound
    if not isinstance(llm, TideKVLLM | ChatTideKV):
        raise ConfigError(f"llm is a {type(llm).__name__}; stuff_documents_chain needs a TideKVLLM or a ChatTideKV")
    return llm, options


class StuffDocumentsChain(Runnable[dict[str, Any], dict[str, Any]]):
    """See :func:`stuff_documents_chain`."""

    def __init__(
        self,
        llm: TideKVLLM | ChatTideKV,
        options: dict[str, Any],
        instructions: str | None,
        overflow: Overflow,
        retriever: BaseRetriever | None,
        document_key: str,
        question_key: str | None,
    ) -> None:
        self.llm, self._options, self._instructions = llm, options, instructions
        self._overflow, self._retriever = overflow, retriever
        self._document_key, self._question_key = document_key, question_key

    # --- running ----------------------------------------------------------------------------------------

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        options = {**self._options, **kwargs}

        def answer(value: dict[str, Any], run_manager: Any, config: RunnableConfig) -> dict[str, Any]:
            child = patch_config(config, callbacks=run_manager.get_child())
            with langchain_errors():
                prompt = self._prompt(value, self._ranked(value, child))
            return _output(self.llm.generate_prompt([prompt], callbacks=child.get("callbacks"), **options))

        return self._call_with_config(answer, input, config, run_type="chain")

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        options = {**self._options, **kwargs}

        async def answer(value: dict[str, Any], run_manager: Any, config: RunnableConfig) -> dict[str, Any]:
            child = patch_config(config, callbacks=run_manager.get_child())
            with langchain_errors():
                prompt = self._prompt(value, await self._aranked(value, child))
            found = await self.llm.agenerate_prompt([prompt], callbacks=child.get("callbacks"), **options)
            return _output(found)

        return await self._acall_with_config(answer, input, config, run_type="chain")

    def stream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield ``{"answer": delta}``, and at last everything else; the dicts can be added up."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """:meth:`stream` for an event loop."""

        async def once() -> AsyncIterator[dict[str, Any]]:
            yield input

        async for part in self.atransform(once(), config, **kwargs):
            yield part

    def transform(
        self, input: Iterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        """:meth:`stream` of an input that comes in parts itself."""
        yield from self._transform_stream_with_config(input, self._parts, config, run_type="chain", **kwargs)

    async def atransform(
        self, input: AsyncIterator[dict[str, Any]], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """:meth:`transform` for an event loop."""
        parts = self._atransform_stream_with_config(input, self._aparts, config, run_type="chain", **kwargs)
        async for part in parts:
            yield part

    def _parts(
        self, inputs: Iterator[dict[str, Any]], run_manager: Any, config: RunnableConfig, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        value = _added_up(list(inputs))
        with langchain_errors():
            prompt = self._prompt(value, self._ranked(value, config))
        for chunk in self._as_chat().stream(prompt, config, **{**self._options, **kwargs}):
            yield from _parts(chunk)

    async def _aparts(
        self, inputs: AsyncIterator[dict[str, Any]], run_manager: Any, config: RunnableConfig, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        value = _added_up([part async for part in inputs])
        with langchain_errors():
            prompt = self._prompt(value, await self._aranked(value, config))
        async for chunk in self._as_chat().astream(prompt, config, **{**self._options, **kwargs}):
            for part in _parts(chunk):
                yield part

    def _as_chat(self) -> ChatTideKV:
        """The same model as a chat model: its chunks carry the figures, those of an LLM are bare strings."""
        if isinstance(self.llm, ChatTideKV):
            return self.llm
        names = [name for name in type(self.llm).model_fields if name in ChatTideKV.model_fields]
        chat = ChatTideKV(**{name: getattr(self.llm, name) for name in names})
        chat._handle = self.llm.engine_handle()
        return chat

    # --- the prompt -------------------------------------------------------------------------------------

    def _prompt(self, value: dict[str, Any], order: Sequence[Document] | None) -> DocumentPrompt:
        documents = self._documents(value)
        corpus = corpus_of(LoadedItem(document.page_content, document.metadata) for document in documents)
        earlier, question = self._asked(value)
        system, history = _history([*_items(value.get("history") or ()), *earlier])
        request = DocumentRequest(
            corpus,
            question,
            history=history,
            instructions=_instructions(self._instructions, system),
            overflow=self._overflow,
            order=None if order is None else _indices(order, documents),
        )
        return DocumentPrompt(message=DocumentMessage.of(request))

    def _documents(self, value: dict[str, Any]) -> list[Document]:
        found = value.get(self._document_key) if isinstance(value, dict) else None
        documents = [found] if isinstance(found, Document) else list(found or ())
        if not documents:
            raise ConfigError(f"{self._document_key!r} holds no document; pass a list with at least one")
        wrong = [type(document).__name__ for document in documents if not isinstance(document, Document)]
        if wrong:
            raise ConfigError(f"{self._document_key!r} holds a {wrong[0]}; pass langchain_core Documents")
        return documents

    def _asked(self, value: dict[str, Any]) -> tuple[list[BaseMessage], str]:
        """What was said before, where the question comes as a conversation, and the question."""
        keys = (self._question_key,) if self._question_key else _QUESTION_KEYS
        found = next((value[key] for key in keys if key in value), None)
        if found is None:
            raise ConfigError(f"the input has no {' or '.join(map(repr, keys))}; pass the question there")
        messages = [found] if isinstance(found, BaseMessage) else found
        if isinstance(messages, list) and messages and all(isinstance(one, BaseMessage) for one in messages):
            *earlier, last = messages
            return earlier, text_of(last)
        if not isinstance(found, str) or not found.strip():
            raise ConfigError("the question is empty; ask something about the documents")
        return [], found

    def _ranked(self, value: dict[str, Any], config: RunnableConfig) -> list[Document] | None:
        if self._overflow != "retrieve" or self._retriever is None:
            return None
        return self._retriever.invoke(self._asked(value)[1], config)

    async def _aranked(self, value: dict[str, Any], config: RunnableConfig) -> list[Document] | None:
        if self._overflow != "retrieve" or self._retriever is None:
            return None
        return await self._retriever.ainvoke(self._asked(value)[1], config)


_Turns = tuple[tuple[str, str], ...]


def _items(turns: Any) -> list[Any]:
    if isinstance(turns, str | bytes | Mapping) or not isinstance(turns, Iterable):
        raise ConfigError(_BAD_HISTORY)
    return list(turns)


def _history(items: Sequence[Any]) -> tuple[str, _Turns]:
    """System text and (question, answer) pairs, from such pairs or from messages in any form that LangChain knows."""
    if all(isinstance(item, tuple | list) and len(item) == 2 and item[0] not in _MESSAGE_ROLES for item in items):
        return "", tuple((str(question), str(answer)) for question, answer in items)
    if any(isinstance(item, str) for item in items):
        raise ConfigError(_BAD_HISTORY)
    try:
        messages = convert_to_messages(items)
    except (ValueError, NotImplementedError, TypeError, KeyError) as error:
        raise ConfigError(_BAD_HISTORY) from error
    return paired_turns(roles_and_texts(messages))


def _instructions(own: str | None, system: str) -> str | None:
    """The chain's instructions, or the default ones, followed by what the history's system messages say."""
    return "\n\n".join([DEFAULT_INSTRUCTIONS if own is None else own, system]).strip() if system else own


def _added_up(parts: Sequence[dict[str, Any]]) -> Any:
    """An input that came in parts, as one; a part that is no dict stands for itself."""
    if not all(isinstance(part, dict) for part in parts):
        return parts[-1]
    value = AddableDict()
    for part in parts:
        value = value + AddableDict(part)
    return value


def _indices(ranked: Sequence[Document], documents: Sequence[Document]) -> tuple[int, ...]:
    """Places in ``documents`` of what a retriever returned: the very page, else by its text, else by its place."""
    places: dict[Any, int] = {}
    for index, document in enumerate(documents):
        for key in _keys(document):
            places.setdefault(key, index)
    found = (next((places[key] for key in _keys(document) if key in places), None) for document in ranked)
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _keys(document: Document) -> list[Any]:
    """What tells a page from others, the surest first."""
    item, text = LoadedItem(document.page_content, document.metadata), document.page_content
    place = (item.source, item.label if item.page is None else item.page)
    return [(*place, text), text] if place[1] is None else [(*place, text), text, place]


def _output(result: LLMResult) -> dict[str, Any]:
    generation = result.generations[0][0]
    info = generation.generation_info or {}
    reported = {name: info.get(name) for name in _REPORTED}
    return {"answer": generation.text, "reasoning": info.get("reasoning_content", ""), **reported}


def _parts(chunk: BaseMessage) -> Iterator[AddableDict]:
    if chunk.text:
        yield AddableDict({"answer": chunk.text})
    if reasoning := chunk.additional_kwargs.get("reasoning_content"):
        yield AddableDict({"reasoning": reasoning})
    if "tidekv" in chunk.response_metadata:
        yield AddableDict(
            {"answer": "", "reasoning": "", **{name: chunk.response_metadata.get(name) for name in _REPORTED}}
        )
