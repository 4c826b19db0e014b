"""TideKV models for LangChain.

from langchain_tidekv import ChatTideKV, TideKVLLM, stuff_documents_chain

chain = stuff_documents_chain(ChatTideKV(model="smollm2-135m"))
result = chain.invoke({"context": load_pdf("manual.pdf"), "question": "How tall is the tower?"})
print(result["answer"], result["citations"])
"""

from langchain_tidekv.chat import ChatTideKV
from langchain_tidekv.documents import StuffDocumentsChain, stuff_documents_chain
from langchain_tidekv.errors import (
    TideKVContextOverflowError,
    TideKVInvalidRequestError,
    TideKVModelError,
    TideKVModelNotFoundError,
    TideKVTimeoutError,
)
from langchain_tidekv.llm import TideKVLLM
from langchain_tidekv.loaders import load_pdf

__all__ = [
    "ChatTideKV",
    "StuffDocumentsChain",
    "TideKVContextOverflowError",
    "TideKVInvalidRequestError",
    "TideKVLLM",
    "TideKVModelError",
    "TideKVModelNotFoundError",
    "TideKVTimeoutError",
    "load_pdf",
    "stuff_documents_chain",
]
