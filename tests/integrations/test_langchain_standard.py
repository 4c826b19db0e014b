"""The standard suites of langchain-tests, on the embedded model.

What the suites skip, they skip for a property below: tool calling, structured output, other models by name. The rest
concerns what there is none of here: images, PDF and audio in messages, settings from the environment, secrets.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_tidekv import ChatTideKV


class _Embedded:
    @property
    def chat_model_class(self) -> type[ChatTideKV]:
        return ChatTideKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m", "max_tokens": 24}

    @property
    def has_tool_calling(self) -> bool:
        return False  # the engine has no grammar to hold a model to a call; no prompt makes that reliable

    @property
    def supports_model_override(self) -> bool:
        return False  # weights are loaded when the object is used: another model is another object


class TestUnit(_Embedded, ChatModelUnitTests):
    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}  # this suite passes max_tokens itself


@pytest.mark.usefixtures("embedded_model_path")
class TestIntegration(_Embedded, ChatModelIntegrationTests):
    @property
    def has_structured_output(self) -> bool:
        return False  # 135 million parameters write no reliable JSON; the parsing has tests of its own

    @property
    def supports_json_mode(self) -> bool:
        return False  # for the same reason

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        llm = ChatTideKV(**self.chat_model_params)
        if not stream:
            return llm.invoke("Hello")
        first, *rest = llm.stream("Hello")
        for chunk in rest:
            first += chunk
        return first
