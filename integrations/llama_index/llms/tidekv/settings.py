"""LlamaIndex counts tokens with OpenAI's tokenizer unless it is told otherwise."""

from __future__ import annotations

from llama_index.llms.tidekv.base import TideKVLLM

# LlamaIndex adds a role word and 3 tokens for each message; a template's own tokens are measured.
_MARGIN = 16


def configure_settings(llm: TideKVLLM) -> None:
    """Make ``llama_index.core.Settings`` use this model, its tokenizer and its real context window.

    Without this, a text that LlamaIndex believes to fit can exceed the window: other tokenizers need other counts,
    above all for languages that are not English. Call it once, before indexes and engines are made.
    """
    from llama_index.core import Settings
    from llama_index.core.indices.prompt_helper import ChatPromptHelper, PromptHelper

    window = llm.metadata.context_window - _template_tokens(llm)
    Settings.llm = llm
    Settings.tokenizer = llm.tokenize
    Settings.prompt_helper = PromptHelper(window, llm.max_tokens, tokenizer=llm.tokenize)
    Settings.chat_prompt_helper = ChatPromptHelper(window, llm.max_tokens, tokenizer=llm.tokenize)


def _template_tokens(llm: TideKVLLM) -> int:
    """Tokens that the chat template adds to a message, with a margin."""
    from tidekv_llm.documents import chat_prompt

    if not llm.metadata.is_chat_model:
        return _MARGIN
    tokenizer = llm.engine_handle().tokenizer()
    return len(chat_prompt([{"role": "user", "content": "x"}], tokenizer)) + _MARGIN
