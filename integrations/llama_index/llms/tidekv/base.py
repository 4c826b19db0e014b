"""TideKVLLM: complete and chat, in all eight ways."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import CachePoint, CitableBlock, CitationBlock, ThinkingBlock, ToolCallBlock
from llama_index.core.llms import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    CustomLLM,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.types import TokenAsyncGen
from pydantic import ConfigDict

from tidekv_fields import TideKVFields
from tidekv_llm.errors import ConfigError
from tidekv_llm.service import (
    Delta,
    ModelCall,
    Reply,
    aiterate,
    arun,
    generation_call,
    iterate,
    merged_messages,
    run,
)

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    # What a tool said reaches the model as the user's words, as in LlamaIndex's own ReAct agent.
}


class TideKVLLM(TideKVFields, CustomLLM):
    """A TideKV model as a LlamaIndex LLM.

        llm = TideKVLLM(model="smollm2-135m", max_tokens=64, kept_tokens=512)
        print(llm.complete("What is the capital of France?"))

    Loading is lazy, and the weights are shared by every object that names the same model. ``complete`` sends the
    text as one user message in the model's chat template, unless ``formatted=True`` or ``chat_template=False``.
    See :class:`tidekv_fields.TideKVFields` for the arguments; errors are those of ``tidekv_llm.errors``.
    """

    # The framework's base class, which comes later, would allow and drop unknown arguments.
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    @classmethod
    def class_name(cls) -> str:
        return "TideKVLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The model's real context window, and whether it takes messages."""
        handle = self.engine_handle()
        return LLMMetadata(
            context_window=handle.context_window(),
            num_output=self.max_tokens,
            is_chat_model=self.chat_template and handle.has_chat_template(),
            model_name=self.model,
        )

    def to_payload(self) -> dict[str, Any]:
        """For traces; LlamaIndex asks for it on the event loop, where nothing may be loaded."""
        return {"class_name": self.class_name(), "model_name": self.model, **self.sampling_fields()}

    def tokenize(self, text: str) -> list[int]:
        """Ids in the model's own vocabulary; works offline, without the weights."""
        return list(self.engine_handle().tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"])

    # --- completion -------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(run(self.engine_handle(), self._completion_call(prompt, formatted, kwargs), self.timeout))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._completions(self._completion_call(prompt, formatted, kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        call = self._completion_call(prompt, formatted, kwargs)
        return _completion(await arun(self.engine_handle(), call, self.timeout))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return self._acompletions(self._completion_call(prompt, formatted, kwargs))

    def _completion_call(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> ModelCall:
        options = self.call_options(kwargs.pop("stop", None), kwargs)
        if not formatted and self.completion_to_prompt is not default_completion_to_prompt:
            assert self.completion_to_prompt is not None
            prompt, formatted = self.completion_to_prompt(prompt), True
        return generation_call(prompt, options, chat_template=self.chat_template and not formatted)

    def _completions(self, call: ModelCall) -> CompletionResponseGen:
        so_far = Delta()
        for item in iterate(self.engine_handle(), call, self.timeout):
            so_far = _added(so_far, item)
            yield _completion_delta(item, so_far)

    async def _acompletions(self, call: ModelCall) -> CompletionResponseAsyncGen:
        so_far = Delta()
        async for item in aiterate(self.engine_handle(), call, self.timeout):
            so_far = _added(so_far, item)
            yield _completion_delta(item, so_far)

    # LlamaIndex asks for ``metadata`` in the next two on the event loop, where no tokenizer may be read.

    async def apredict(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        await asyncio.to_thread(getattr, self, "metadata")
        return await super().apredict(prompt, **prompt_args)

    async def astream(self, prompt: BasePromptTemplate, **prompt_args: Any) -> TokenAsyncGen:
        await asyncio.to_thread(getattr, self, "metadata")
        return await super().astream(prompt, **prompt_args)

    # --- chat -------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(run(self.engine_handle(), self._chat_call(messages, kwargs), self.timeout))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chats(self._chat_call(messages, kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(await arun(self.engine_handle(), self._chat_call(messages, kwargs), self.timeout))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self._achats(self._chat_call(messages, kwargs))

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> ModelCall:
        options = self.call_options(kwargs.pop("stop", None), kwargs)
        turns = engine_messages(messages)
        assert self.messages_to_prompt is not None
        plain = partial(self.messages_to_prompt, messages)
        if self.chat_template and self.messages_to_prompt is generic_messages_to_prompt:
            return generation_call(turns, options, chat_template=True, plain=plain)
        return generation_call(plain(), options, chat_template=False)

    def _chats(self, call: ModelCall) -> ChatResponseGen:
        for response in self._completions(call):
            yield _as_chat(response)

    async def _achats(self, call: ModelCall) -> ChatResponseAsyncGen:
        async for response in self._acompletions(call):
            yield _as_chat(response)


def engine_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """LlamaIndex's messages as the engine's.

    Raises:
        ConfigError: content that is not text, or an empty prompt.
    """
    return merged_messages([(_ROLES.get(message.role, "user"), _text(message.blocks)) for message in messages])


def _text(blocks: Sequence[Any]) -> str:
    """The text of a message; its reasoning, its calls of tools and marks for caches are passed over.

    Raises:
        ConfigError: a picture, a sound or a file.
    """
    found: list[str] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            found.append(block.text)
        elif isinstance(block, CitableBlock):
            found.append(_text(block.content))
        elif isinstance(block, CitationBlock):
            found.append(_text([block.cited_content]))
        elif not isinstance(block, ThinkingBlock | ToolCallBlock | CachePoint):
            raise ConfigError(f"a message holds a {block.block_type!r} block; these models read text only")
    return "\n".join(found)


# --- responses: plain numbers and strings, no tensors -----------------------------------------------------


def _figures(reply: Reply) -> dict[str, Any]:
    info = reply.as_info()
    return {
        "raw": {"usage": info["token_usage"], **info},
        "additional_kwargs": {
            **info["token_usage"],
            "finish_reason": reply.finish_reason,
            "tidekv": info["tidekv"],
        },
    }


def _completion(reply: Reply) -> CompletionResponse:
    figures = _figures(reply)
    figures["additional_kwargs"]["reasoning"] = reply.reasoning
    return CompletionResponse(text=reply.text, **figures)


def _added(so_far: Delta, item: Delta | Reply) -> Delta:
    """All that came until now; the Reply at the end brings no more of it."""
    if isinstance(item, Reply):
        return so_far
    return Delta(so_far.text + item.text, so_far.reasoning + item.reasoning)


def _completion_delta(item: Delta | Reply, so_far: Delta) -> CompletionResponse:
    if isinstance(item, Reply):
        return _completion(item).model_copy(update={"delta": ""})
    told: dict[str, Any] = {"reasoning": so_far.reasoning}
    if item.reasoning:
        told["thinking_delta"] = item.reasoning  # its name in LlamaIndex's own integrations
    return CompletionResponse(text=so_far.text, delta=item.text, additional_kwargs=told)


def _as_chat(response: CompletionResponse) -> ChatResponse:
    """The reasoning is a block of its own, which later prompts leave out."""
    figures = dict(response.additional_kwargs)
    thoughts = figures.pop("reasoning", "")
    blocks = [*([ThinkingBlock(content=thoughts)] if thoughts else []), TextBlock(text=response.text)]
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=figures,
    )


def _chat(reply: Reply) -> ChatResponse:
    return _as_chat(_completion(reply))
