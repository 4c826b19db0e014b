"""What every framework integration shares: engines by name, one worker per model, whole documents, citations.

Knows no framework and imports torch only when a model is used, so that importing an integration stays quick.
"""

from tidekv_llm.integration.documents import Corpus, DocumentRequest, corpus_of, document_job
from tidekv_llm.integration.engines import EngineHandle, EngineSpec, unload_unused
from tidekv_llm.integration.fields import TideKVFields
from tidekv_llm.integration.requests import (
    Reply,
    RequestTimeoutError,
    aiterate,
    arun,
    call_options,
    conversation,
    generation_job,
    iterate,
    run,
)

__all__ = [
    "Corpus",
    "DocumentRequest",
    "EngineHandle",
    "EngineSpec",
    "Reply",
    "RequestTimeoutError",
    "TideKVFields",
    "aiterate",
    "arun",
    "call_options",
    "conversation",
    "corpus_of",
    "document_job",
    "generation_job",
    "iterate",
    "run",
    "unload_unused",
]
