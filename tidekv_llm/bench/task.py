"""What one measuring process is told to do; light enough for the command line."""

from __future__ import annotations

from dataclasses import dataclass

HF_ONE_SHOT = "hf-one-shot"


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    Attributes:
        method: ``hf-one-shot`` or the name of a schedule.
        model: alias, id, folder, or ``random:NAME``.
        prompt_tokens: S.
        kept_tokens: K.
        chunk_size: C.
        new_tokens: tokens to decode; the first one ends the time to first token.
        prompt_index: which part of the corpus.
        layers: of a random model, None for its own number.
        bridge: ``device`` or ``host``.
        memory_limit: bytes that this process may take beyond the loaded model, 0 for no limit.
    """

    method: str
    model: str = "smollm2-135m"
    prompt_tokens: int = 8192
    kept_tokens: int = 1024
    chunk_size: int = 512
    new_tokens: int = 33
    prompt_index: int = 0
    layers: int | None = None
    bridge: str = "device"
    memory_limit: int = 0
