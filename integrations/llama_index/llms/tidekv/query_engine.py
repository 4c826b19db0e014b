"""WholeDocumentQueryEngine: pages go into the prompt verbatim, and the answer comes with page citations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import BaseNode, Document, NodeWithScore, QueryBundle

from llama_index.llms.tidekv.base import TideKVLLM
from tidekv_llm.documents.loaded import LoadedItem, corpus_of
from tidekv_llm.errors import ConfigError
from tidekv_llm.service import (
    Delta,
    DocumentRequest,
    ModelCall,
    Overflow,
    Reply,
    aiterate,
    arun,
    document_call,
    iterate,
    run,
)

_REPORTED = ("citations", "pages", "warnings", "finish_reason", "token_usage", "tidekv")


class WholeDocumentQueryEngine(BaseQueryEngine):
    """Answers from whole documents.

    The response's ``source_nodes`` are the cited pages; its ``metadata`` has ``citations`` (page label, quote,
    verified), ``pages`` (which went in, which did not, with token counts), ``token_usage`` and ``tidekv``.

    Args:
        llm: the model.
        documents: pages in reading order, as a reader gives them.
        instructions: what the model should do with them.
        overflow: what happens when they exceed the window: ``"error"``, or ``"retrieve"``, which keeps the pages
            that have most to do with the question, in reading order.
        retriever: ranks the pages instead of BM25.
        streaming: return the answer as it comes.

    Raises:
        ConfigError: another kind of model, no documents, or an unknown ``overflow``.
    """

    def __init__(
        self,
        llm: TideKVLLM,
        documents: Sequence[BaseNode | NodeWithScore],
        *,
        instructions: str | None = None,
        overflow: Overflow = "error",
        retriever: BaseRetriever | None = None,
        streaming: bool = False,
    ) -> None:
        if not isinstance(llm, TideKVLLM):
            raise ConfigError(f"llm is a {type(llm).__name__}; WholeDocumentQueryEngine needs a TideKVLLM")
        if overflow not in ("error", "retrieve"):
            raise ConfigError(f"overflow={overflow!r} is unknown; choose 'error' or 'retrieve'")
        self._llm, self._instructions, self._overflow = llm, instructions, overflow
        self._retriever, self._streaming = retriever, streaming
        self._nodes = [node.node if isinstance(node, NodeWithScore) else node for node in documents]
        self._corpus = corpus_of(LoadedItem(node.get_content(), node.metadata, _owner(node)) for node in self._nodes)
        super().__init__(callback_manager=llm.callback_manager)

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    # --- querying ---------------------------------------------------------------------------------------

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        retriever = self._ranker()
        ranked = None if retriever is None else retriever.retrieve(query_bundle)
        call = self._call(query_bundle, ranked)
        if self._streaming:
            return self._stream(call)
        return self._response(run(self._llm.engine_handle(), call, self._llm.timeout))

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        retriever = self._ranker()
        ranked = None if retriever is None else await retriever.aretrieve(query_bundle)
        call = self._call(query_bundle, ranked)
        if self._streaming:
            return self._astream(call)
        return self._response(await arun(self._llm.engine_handle(), call, self._llm.timeout))

    def _ranker(self) -> BaseRetriever | None:
        return self._retriever if self._overflow == "retrieve" else None

    def _call(self, query: QueryBundle, ranked: Sequence[NodeWithScore] | None) -> ModelCall:
        request = DocumentRequest(
            self._corpus,
            query.query_str,
            instructions=self._instructions,
            overflow=self._overflow,
            order=None if ranked is None else _indices([found.node for found in ranked], self._nodes),
        )
        return document_call(request, self._llm.call_options(None, {}))

    # --- responses --------------------------------------------------------------------------------------

    def _response(self, reply: Reply) -> Response:
        return Response(reply.text, source_nodes=self._sources(reply), metadata=_metadata(reply))

    def _sources(self, reply: Reply) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=self._nodes[item], score=citation["score"])
            for citation in reply.extra["citations"]
            for item in citation["items"]
        ]

    def _stream(self, call: ModelCall) -> StreamingResponse:
        """Sources and metadata are there once the text is through."""
        response = StreamingResponse(response_gen=iter(()), source_nodes=[], metadata={})  # type: ignore[arg-type]

        def deltas() -> Generator[str, None, None]:
            for item in iterate(self._llm.engine_handle(), call, self._llm.timeout):
                if isinstance(item, Delta):
                    yield item.text
                else:
                    self._complete(response, item)

        response.response_gen = deltas()
        return response

    def _astream(self, call: ModelCall) -> AsyncStreamingResponse:
        response: AsyncStreamingResponse

        async def deltas() -> AsyncGenerator[str, None]:
            async for item in aiterate(self._llm.engine_handle(), call, self._llm.timeout):
                if isinstance(item, Delta):
                    yield item.text
                else:
                    self._complete(response, item)

        response = AsyncStreamingResponse(response_gen=deltas(), source_nodes=[], metadata={})
        return response

    def _complete(self, response: StreamingResponse | AsyncStreamingResponse, reply: Reply) -> None:
        response.source_nodes.extend(self._sources(reply))
        assert response.metadata is not None
        response.metadata.update(_metadata(reply))


def _owner(node: BaseNode) -> str | None:
    """The loader's document that a node is, or was cut from; None for one that was made by hand."""
    return node.node_id if isinstance(node, Document) else node.ref_doc_id


def _metadata(reply: Reply) -> dict[str, Any]:
    info = reply.as_info()
    return {**{name: info[name] for name in _REPORTED}, "reasoning": reply.reasoning}


def _indices(ranked: Sequence[BaseNode], nodes: Sequence[BaseNode]) -> tuple[int, ...]:
    """Places in ``nodes`` of what a retriever returned: by id, by the document it was cut from, or by text."""
    places: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for key in (node.node_id, node.get_content()):
            places.setdefault(key, index)
    found = (
        next((places[key] for key in (node.node_id, node.ref_doc_id, node.get_content()) if key in places), None)
        for node in ranked
    )
    return tuple(dict.fromkeys(index for index in found if index is not None))
