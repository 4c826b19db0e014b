"""The hidden-state bridge between layers (paper, section 5): prompt-wide, its slots reused by every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunks import Chunk


def make_bridge(where: str, batch: int, first: int, prompt_length: int, decoder: Decoder) -> HiddenBridge:
    """A bridge on the ``"device"``, or on the ``"host"`` for a device with little memory."""
    return (HostBridge if where == "host" else HiddenBridge)(batch, first, prompt_length, decoder)


class HiddenBridge:
    """Hidden states of the prompt positions [first, S); a chunk's output replaces its input.

    Args:
        batch: B.
        first: position of the first slot; those before it come from a store.
        prompt_length: S.
        decoder: whose hidden states they are.
    """

    def __init__(self, batch: int, first: int, prompt_length: int, decoder: Decoder) -> None:
        self._first, self._device = first, decoder.device
        self._slots = self._allocate((batch, prompt_length - first, decoder.hidden_size), decoder.dtype)

    def _allocate(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _slot(self, chunk: Chunk) -> Tensor:
        return self._slots[:, chunk.start - self._first : chunk.stop - self._first]

    def read(self, chunk: Chunk, ahead: Chunk | None = None) -> Tensor:
        """Input of a chunk, [B, C, d_model]; ``ahead`` is the chunk that will be read next in this layer."""
        return self._slot(chunk)

    def write(self, chunk: Chunk, hidden: Tensor) -> None:
        """Put a chunk's output where its input was."""
        self._slot(chunk).copy_(hidden)

    def last(self) -> Tensor:
        """Hidden state of the last position [B, 1, d_model], a copy: the bridge can be released."""
        return self._slots[:, -1:].clone()

    def all(self) -> Tensor:
        """Hidden states of all positions [B, S - first, d_model]."""
        return self._slots

    @property
    def nbytes(self) -> int:
        """B * S * d_model * element size (the hidden term of Eq. 9)."""
        return self._slots.nbytes


class HostBridge(HiddenBridge):
    """Hidden states in host memory: pinned on CUDA, with copies that overlap the computation.

    A chunk's input is fetched while the chunk before it is computed, so the device holds two inputs and one output
    on its way back. All copies go through one stream of their own: what is written is written before it is read.
    """

    def __init__(self, batch: int, first: int, prompt_length: int, decoder: Decoder) -> None:
        super().__init__(batch, first, prompt_length, decoder)
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._fetched: tuple[Chunk, Tensor] | None = None

    def _allocate(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def read(self, chunk: Chunk, ahead: Chunk | None = None) -> Tensor:
        if self._stream is None:  # the host's memory is the device's
            return super().read(chunk)
        hidden = self._fetched[1] if self._fetched and self._fetched[0] == chunk else self._fetch(chunk)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        hidden.record_stream(current)
        self._fetched = (ahead, self._fetch(ahead)) if ahead is not None else None
        return hidden

    def _fetch(self, chunk: Chunk) -> Tensor:
        with torch.cuda.stream(self._stream):
            return self._slot(chunk).to(self._device, non_blocking=True)

    def write(self, chunk: Chunk, hidden: Tensor) -> None:
        if self._stream is None:
            super().write(chunk, hidden)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._slot(chunk).copy_(hidden, non_blocking=True)
        hidden.record_stream(self._stream)

    def last(self) -> Tensor:
        self._wait()
        return super().last().to(self._device)

    def all(self) -> Tensor:
        self._wait()
        return self._slots.to(self._device)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
