"""TideKVLLM: text in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.messages import BaseMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from pydantic import ConfigDict

from langchain_tidekv.errors import langchain_errors
from langchain_tidekv.prompts import PromptText, engine_messages, keep_messages
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

_call: ContextVar[dict[str, Any] | None] = ContextVar("tidekv_call", default=None)


class TideKVLLM(TideKVFields, BaseLLM):
    """A TideKV model as a LangChain LLM.

        llm = TideKVLLM(model="smollm2-135m", max_tokens=64, kept_tokens=512)
        llm.invoke("What is the capital of France?")

    Loading is lazy, and the weights are shared by every object that names the same model. A plain string is one
    user message in the model's chat template; ``chat_template=False`` continues it as it stands. See
    :class:`tidekv_fields.TideKVFields` for the arguments.
    """

    # The framework's base class, which comes later, would allow and drop unknown arguments.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @property
    def _llm_type(self) -> str:
        return "tidekv"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """The cache's key: within a call its options too, or other options would get a wrong cached answer."""
        call = _call.get()
        with langchain_errors():
            return self.identity() if call is None else {**self.identity(), "call": call}

    # --- prompts ----------------------------------------------------------------------------------------

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        with langchain_errors():
            return keep_messages(super()._convert_input(model_input))

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        with langchain_errors():
            texts = [keep_messages(prompt).to_string() for prompt in prompts]
        return self.generate(texts, *args, **kwargs)

    async def agenerate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        with langchain_errors():
            texts = [keep_messages(prompt).to_string() for prompt in prompts]
        return await self.agenerate(texts, *args, **kwargs)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        with _call_in_key(prompts, kwargs):
            return super().generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        with _call_in_key(prompts, kwargs):
            return await super().agenerate(prompts, *args, **kwargs)

    def _call(self, prompt: str, stop: list[str] | None, kwargs: dict[str, Any]) -> ModelCall:
        options = self.call_options(stop, kwargs)
        payload = prompt.payload if isinstance(prompt, PromptText) else None
        if isinstance(payload, DocumentRequest):
            return document_call(payload, options)
        if payload is not None and self.chat_template:
            return generation_call(payload, options, chat_template=True, plain=lambda: str(prompt))
        return generation_call(str(prompt), options, chat_template=self.chat_template)

    # --- generating -------------------------------------------------------------------------------------

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            calls = [self._call(prompt, stop, kwargs) for prompt in prompts]
            return _result([run(self.engine_handle(), call, self.timeout) for call in calls])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with langchain_errors():
            calls = [self._call(prompt, stop, kwargs) for prompt in prompts]
            return _result([await arun(self.engine_handle(), call, self.timeout) for call in calls])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with langchain_errors():
            for item in iterate(self.engine_handle(), self._call(prompt, stop, kwargs), self.timeout):
                chunk = _chunk(item)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        with langchain_errors():
            async for item in aiterate(self.engine_handle(), self._call(prompt, stop, kwargs), self.timeout):
                chunk = _chunk(item)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    # --- batches: one bad prompt does not spoil the others ----------------------------------------------

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        if not return_exceptions:
            return super().batch(inputs, config, **kwargs)
        answers: list[Any] = []
        for item, one in zip(inputs, get_config_list(config, len(inputs)), strict=True):
            try:
                answers.append(self.invoke(item, one, **kwargs))
            except Exception as error:
                answers.append(error)
        return answers

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        if not return_exceptions:
            return await super().abatch(inputs, config, **kwargs)
        answers: list[Any] = []
        for item, one in zip(inputs, get_config_list(config, len(inputs)), strict=True):
            try:
                answers.append(await self.ainvoke(item, one, **kwargs))
            except Exception as error:
                answers.append(error)
        return answers

    # --- counting ---------------------------------------------------------------------------------------

    def get_token_ids(self, text: str) -> list[int]:
        """Ids in the model's own vocabulary; works offline, without the weights."""
        return self.custom_get_token_ids(text) if self.custom_get_token_ids else token_ids(self, text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        """Tokens of the conversation in the chat template."""
        return count_messages(self, messages, tools)


def token_ids(llm: TideKVFields, text: str) -> list[int]:
    """Ids of a text by itself, without special tokens around it."""
    with langchain_errors():
        return list(llm.engine_handle().tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"])


def count_messages(llm: TideKVFields, messages: list[BaseMessage], tools: Any) -> int:
    """Prompt tokens of a conversation, as the model gets it."""
    from tidekv_llm.documents import chat_prompt
    from tidekv_llm.errors import ConfigError

    with langchain_errors():
        if tools:
            raise ConfigError("tools cannot be counted: these models are called without tools")
        return len(chat_prompt(engine_messages(messages), llm.engine_handle().tokenizer()))


def reasoning_content(item: Delta | Reply) -> dict[str, Any]:
    """What the model thought, under the name that LangChain knows; nothing if it told nothing."""
    return {"reasoning_content": item.reasoning} if item.reasoning else {}


def _chunk(item: Delta | Reply) -> GenerationChunk:
    """Figures go on the last chunk only: LangChain adds chunks up, and some figures cannot be added."""
    if isinstance(item, Delta):
        return GenerationChunk(text=item.text, generation_info=reasoning_content(item) or None)
    return GenerationChunk(text="", generation_info=item.as_info())


def _result(replies: list[Reply]) -> LLMResult:
    generations = [
        [Generation(text=reply.text, generation_info={**reply.as_info(), **reasoning_content(reply)})]
        for reply in replies
    ]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    total = {name: sum(reply.usage[name] for reply in replies) for name in names}
    output: dict[str, Any] = {"token_usage": total, "model_name": replies[0].model if replies else ""}
    if len(replies) == 1:
        output["tidekv"] = replies[0].metrics.as_dict()
    return LLMResult(generations=generations, llm_output=output)


_NOT_OPTIONS = ("stop", "callbacks", "tags", "metadata", "run_name", "run_id")


@contextmanager
def _call_in_key(prompts: list[str], kwargs: dict[str, Any]) -> Iterator[None]:
    options = sorted((name, repr(value)) for name, value in kwargs.items() if name not in _NOT_OPTIONS)
    kinds = [type(getattr(prompt, "payload", "")).__name__ for prompt in prompts]
    token = _call.set({"options": options, "kinds": sorted(set(kinds))})
    try:
        yield
    finally:
        _call.reset(token)
