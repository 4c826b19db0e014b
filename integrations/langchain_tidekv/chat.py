"""ChatTideKV: messages in, a message out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from langchain_tidekv.errors import TideKVInvalidRequestError, langchain_errors
from langchain_tidekv.llm import count_messages, reasoning_content, token_ids
from langchain_tidekv.prompts import payload_of
from tidekv_fields import TideKVFields
from tidekv_llm.service import (
    Delta,
    DocumentRequest,
    ModelCall,
    Reply,
    aiterate,
    arun,
    document_call,
    generation_call,
    iterate,
    run,
)


class ChatTideKV(TideKVFields, BaseChatModel):
    """A TideKV model as a LangChain chat model.

        chat = ChatTideKV(model="smollm2-135m", max_tokens=64)
        for chunk in chat.stream("Tell me about lighthouses."):
            print(chunk.text, end="", flush=True)

    The arguments are those of :class:`tidekv_fields.TideKVFields`. ``streaming``, ``max_retries`` and
    ``api_key`` are LangChain's standard ones: the last two mean nothing to a model in this process.
    """

    # The framework's base class, which comes later, would allow and drop unknown arguments.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    streaming: bool = Field(default=False, description="Stream inside invoke() too, for callbacks.")
    max_retries: int | None = Field(default=None, exclude=True, description="Unused: nothing is sent anywhere.")
    api_key: SecretStr | None = Field(default=None, exclude=True, description="Unused: nothing is sent anywhere.")

    @property
    def _llm_type(self) -> str:
        return "tidekv-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        with langchain_errors():
            return self.identity()

    def _resolve_model_profile(self) -> ModelProfile | None:
        """Known here if a local file tells; complete once the model is loaded."""
        window = self.engine_handle().quick_window()
        return None if window is None else _profile(window, self.max_tokens)

    def _call(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> ModelCall:
        kwargs.pop("stream", None)  # LangChain's own switch, handled before this
        options = self.call_options(stop, kwargs)
        payload = payload_of(messages)
        if isinstance(payload, DocumentRequest):
            return document_call(payload, options)
        return generation_call(payload, options, chat_template=True)

    def _learn_profile(self) -> None:
        handle = self.engine_handle()
        if self.profile is None and handle.loaded:
            self.profile = _profile(handle.context_window(), self.max_tokens)

    # --- generating -------------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            reply = run(self.engine_handle(), self._call(messages, stop, kwargs), self.timeout)
        self._learn_profile()
        return _result(reply)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            reply = await arun(self.engine_handle(), self._call(messages, stop, kwargs), self.timeout)
        self._learn_profile()
        return _result(reply)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            for item in iterate(self.engine_handle(), self._call(messages, stop, kwargs), self.timeout):
                yield _chunk(item)
        self._learn_profile()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            async for item in aiterate(self.engine_handle(), self._call(messages, stop, kwargs), self.timeout):
                yield _chunk(item)
        self._learn_profile()

    def bind_tools(self, tools: Any, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Refused: no grammar holds these models to a call that a program could run.

        Raises:
            TideKVInvalidRequestError: always; it says what to use instead.
        """
        raise TideKVInvalidRequestError(
            f"{type(self).__name__} cannot call tools: nothing holds the model to a valid call; use "
            "with_structured_output(schema) and call the tool yourself, or put its result into a message"
        )

    # --- structured output ------------------------------------------------------------------------------

    def with_structured_output(
        self, schema: dict[str, Any] | type, *, include_raw: bool = False, **kwargs: Any
    ) -> Runnable[LanguageModelInput, Any]:
        """Ask for JSON of this schema in words, and parse it; ``method`` and ``strict`` change nothing.

        No grammar constrains the model, so a small one may fail: then the parser raises, or with ``include_raw``
        the error is in ``parsing_error``.
        """
        for name in ("method", "strict"):
            kwargs.pop(name, None)
        if kwargs:
            raise ValueError(f"Received unsupported arguments {kwargs}")
        parser: Runnable[Any, Any] = JsonOutputParser()
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            parser = PydanticOutputParser(pydantic_object=schema)
        model = RunnableLambda(_ask_for_json(self, schema)) | self
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=lambda raw: parser.invoke(raw["raw"]), parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # --- counting ---------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Ids in the model's own vocabulary; works offline, without the weights."""
        return self.custom_get_token_ids(text) if self.custom_get_token_ids else token_ids(self, text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        """Tokens of the conversation in the chat template."""
        return count_messages(self, messages, tools)


def _profile(window: int, max_tokens: int) -> ModelProfile:
    return ModelProfile(max_input_tokens=window, max_output_tokens=max_tokens, text_inputs=True, text_outputs=True)


def _ask_for_json(chat: ChatTideKV, schema: dict[str, Any] | type) -> Any:
    """A function that appends the schema to the last message."""
    parameters = convert_to_openai_tool(schema)["function"]["parameters"]
    wish = f"Answer with one JSON object that follows this JSON schema, and nothing else:\n{json.dumps(parameters)}"

    def extend(model_input: LanguageModelInput) -> ChatPromptValue:
        messages = chat._convert_input(model_input).to_messages()
        return ChatPromptValue(messages=[*messages, HumanMessage(wish)])

    return extend


def _usage(reply: Reply) -> UsageMetadata:
    usage = reply.usage
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=reply.metrics.reused_prefix_tokens),
    )


def _metadata(reply: Reply) -> dict[str, Any]:
    return {"model_provider": "tidekv", **reply.as_info()}


def _result(reply: Reply) -> ChatResult:
    message = AIMessage(
        content=reply.text,
        additional_kwargs=reasoning_content(reply),
        usage_metadata=_usage(reply),
        response_metadata=_metadata(reply),
    )
    generation = ChatGeneration(message=message, generation_info={**reply.as_info(), **reasoning_content(reply)})
    return ChatResult(generations=[generation], llm_output={"token_usage": reply.usage, "model_name": reply.model})


def _chunk(item: Delta | Reply) -> ChatGenerationChunk:
    """Usage and figures go on the last chunk only: LangChain adds chunks up, and some figures cannot be added."""
    if isinstance(item, Delta):
        return ChatGenerationChunk(message=AIMessageChunk(content=item.text, additional_kwargs=reasoning_content(item)))
    last = AIMessageChunk(
        content="", usage_metadata=_usage(item), response_metadata=_metadata(item), chunk_position="last"
    )
    return ChatGenerationChunk(message=last, generation_info=item.as_info())
