"""The figures of one request."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Metrics:
    """Times in seconds, sizes in bytes.

    Attributes:
        prompt_tokens: S, tokens of the prompt.
        new_tokens: generated tokens, the end-of-sequence token not counted.
        reused_prefix_tokens: prompt tokens whose keys and values came from a session's store.
        ttft_seconds: time to first token: prefill, selection and the first token.
        prefill_seconds: building the cache, compression included.
        compress_seconds: scoring, selection and gathering.
        decode_tokens_per_second: rate of the tokens after the first; 0 when there were none.
        decode_steps: steps of the model after the prefill.
        drafted_tokens: tokens that the document suggested, checked in those steps.
        accepted_tokens: those of them that the model would have said itself.
        chunk_size: C that was used.
        kept_tokens: positions in the fullest layer after prefill.
        cache_bytes: keys and values kept, after prefill.
        construction_peak_bytes: highest memory while the cache was built (CUDA: allocated; CPU: process).
        transient_bytes: construction peak minus the steady state after it.
        peaks: ``process``, ``allocated``, ``reserved`` and ``nvml`` peaks; None where there is no such thing.
        components: bytes of weights, active_kv, bridge, activations, temporary, compressed_cache and
            document_store (a session's keys and values in host memory).
        selector: name of the selector.
        schedule: name of the schedule.
        attention: name of the attention choice.
        notes: what a reader of the figures must know (how the peak was measured, say).
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    reused_prefix_tokens: int = 0
    ttft_seconds: float = 0.0
    prefill_seconds: float = 0.0
    compress_seconds: float = 0.0
    decode_tokens_per_second: float = 0.0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    chunk_size: int = 0
    kept_tokens: int = 0
    cache_bytes: int = 0
    construction_peak_bytes: int = 0
    transient_bytes: int = 0
    peaks: dict[str, int | None] = field(default_factory=dict)
    components: dict[str, int] = field(default_factory=dict)
    selector: str = ""
    schedule: str = ""
    attention: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def accepted_tokens_per_step(self) -> float:
        """How many drafted tokens a step let through on average; 0 without steps."""
        return self.accepted_tokens / self.decode_steps if self.decode_steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain numbers, strings, lists and dicts: JSON as it stands."""
        return asdict(self)
