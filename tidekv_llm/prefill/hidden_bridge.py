"""The hidden-state bridge between layers (paper, section 5): prompt-wide, its slots reused by every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunks import Chunk


class HiddenBridge:
    """Hidden states of the prompt positions [first, S); a chunk's output replaces its input.

    Args:
        batch: B.
        first: position of the first slot; those before it come from a store.
        prompt_length: S.
        decoder: whose hidden states they are.
    """

    def __init__(self, batch: int, first: int, prompt_length: int, decoder: Decoder) -> None:
        shape = (batch, prompt_length - first, decoder.hidden_size)
        self._first = first
        self._slots = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)

    def read(self, chunk: Chunk) -> Tensor:
        """Input of a chunk, a view [B, C, d_model]."""
        return self._slots[:, chunk.start - self._first : chunk.stop - self._first]

    def write(self, chunk: Chunk, hidden: Tensor) -> None:
        """Put a chunk's output where its input was."""
        self._slots[:, chunk.start - self._first : chunk.stop - self._first] = hidden

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
