"""TideKV-LLM: whole documents in a language model, without the memory peak of building the KV cache.

    from tidekv_llm import Document, TideKV

    with TideKV.from_pretrained("smollm2-135m") as llm:
        print(llm.ask(Document.from_pdf("contract.pdf"), "What is the notice period?").text)

Names are imported when they are first used, so ``import tidekv_llm`` loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tidekv_llm.version import __version__ as __version__

if TYPE_CHECKING:
    from tidekv_llm.cache.compressed import CompressedCache
    from tidekv_llm.compress.selectors import Selector, register_selector
    from tidekv_llm.config import PrefillConfig, selector_names
    from tidekv_llm.documents import Citation, Document, Page
    from tidekv_llm.engine import Answer, Generation, Stream, TideKV
    from tidekv_llm.hf import tidekv_attention
    from tidekv_llm.metrics import Metrics
    from tidekv_llm.options import Sampling
    from tidekv_llm.prefill.result import Prefilled
    from tidekv_llm.request import Progress

_HOME = {
    "Answer": "tidekv_llm.engine",
    "Citation": "tidekv_llm.documents",
    "CompressedCache": "tidekv_llm.cache.compressed",
    "Document": "tidekv_llm.documents",
    "Generation": "tidekv_llm.engine",
    "Metrics": "tidekv_llm.metrics",
    "Page": "tidekv_llm.documents",
    "PrefillConfig": "tidekv_llm.config",
    "Prefilled": "tidekv_llm.prefill.result",
    "Progress": "tidekv_llm.request",
    "Sampling": "tidekv_llm.options",
    "Selector": "tidekv_llm.compress.selectors",
    "Stream": "tidekv_llm.engine",
    "TideKV": "tidekv_llm.engine",
    "register_selector": "tidekv_llm.compress.selectors",
    "selector_names": "tidekv_llm.config",
    "tidekv_attention": "tidekv_llm.hf",
}

__all__ = [
    "Answer",
    "Citation",
    "CompressedCache",
    "Document",
    "Generation",
    "Metrics",
    "Page",
    "PrefillConfig",
    "Prefilled",
    "Progress",
    "Sampling",
    "Selector",
    "Stream",
    "TideKV",
    "register_selector",
    "selector_names",
    "tidekv_attention",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
