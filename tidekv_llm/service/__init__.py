"""What every caller of several engines shares: engines by name, whose turn it is, requests on threads and event loops.

The two frameworks, the app and a server stand on it. It knows none of them, needs no pydantic, and imports torch only
when a model is used.
"""

from tidekv_llm.decode.reasoning import Delta
from tidekv_llm.service.documents import DocumentRequest, Overflow, document_call
from tidekv_llm.service.identity import model_identity
from tidekv_llm.service.messages import merged_messages, paired_turns
from tidekv_llm.service.pool import EngineHandle, EnginePool, EngineSpec, ModelFacts
from tidekv_llm.service.requests import (
    CALL_OPTIONS,
    CallOptions,
    ModelCall,
    Reply,
    RequestTimeoutError,
    aiterate,
    arun,
    call_options,
    generation_call,
    iterate,
    run,
)

__all__ = [
    "CALL_OPTIONS",
    "CallOptions",
    "Delta",
    "DocumentRequest",
    "EngineHandle",
    "EnginePool",
    "EngineSpec",
    "ModelCall",
    "ModelFacts",
    "Overflow",
    "Reply",
    "RequestTimeoutError",
    "aiterate",
    "arun",
    "call_options",
    "document_call",
    "generation_call",
    "iterate",
    "merged_messages",
    "model_identity",
    "paired_turns",
    "run",
]
