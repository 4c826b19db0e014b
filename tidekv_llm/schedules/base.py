"""The interface of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tidekv_llm.attention import AttentionDispatch
    from tidekv_llm.cache.compressed import CompressedCache
    from tidekv_llm.compress.compressor import Compressor
    from tidekv_llm.hf import Decoder
    from tidekv_llm.memory import MemoryMeter
    from tidekv_llm.prefill.prefix import PrefixReader, PrefixWriter
    from tidekv_llm.request import Request


@dataclass(frozen=True)
class Job:
    """Everything a schedule needs besides the model and the prompt.

    Attributes:
        compressor: chooses and stores what stays of a layer.
        attention: backend choice.
        request: progress, cancellation and timings.
        meter: told the bytes of each component.
        chunk_size: C, tokens per step.
        boundaries: positions where a chunk must end: the ends of the documents.
        reader: keys and values of the first ``reused`` positions, or None.
        reused: prompt positions that need not be computed.
        writer: takes the keys and values of the first positions while they pass by, or None.
        all_outputs: also compute the last layer's hidden states that the next token does not need (to measure
            fidelity).
        bridge: where the hidden states between layers lie, ``"device"`` or ``"host"``.
        mlp_chunk_size: tokens per call of a layer's MLP, 0 for no split.
    """

    compressor: Compressor
    attention: AttentionDispatch
    request: Request
    meter: MemoryMeter
    chunk_size: int
    boundaries: tuple[int, ...] = ()
    reader: PrefixReader | None = None
    reused: int = 0
    writer: PrefixWriter | None = None
    all_outputs: bool = False
    bridge: str = "device"
    mlp_chunk_size: int = 0


class Schedule(Protocol):
    """An order in which the compressed cache is built."""

    name: str
    reuses_prefix: bool
    """Whether ``job.reader`` and ``job.writer`` are used; a schedule that says no must not be given them."""

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        """Cache and last layer's hidden states from ids [B, S].

        The hidden states are [B, 1, d_model], of the last token, or [B, S, d_model] with ``job.all_outputs``.
        """
