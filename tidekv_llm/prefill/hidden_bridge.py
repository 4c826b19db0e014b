"""The hidden-state bridge between layers (paper, section 5): prompt-wide, its slots reused by every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_llm.prefill.chunks import Chunk


class HiddenBridge:
    """Hidden states [B, S, d_model]; a chunk's output replaces its input."""

    def __init__(self, batch: int, prompt_length: int, hidden_size: int, dtype: torch.dtype, device: torch.device):
        self._slots = torch.empty((batch, prompt_length, hidden_size), dtype=dtype, device=device)

    def read(self, chunk: Chunk) -> Tensor:
        """Input of a chunk, a view [B, C, d_model]."""
        return self._slots[:, chunk.start : chunk.stop]

    def write(self, chunk: Chunk, hidden: Tensor) -> None:
        """Put a chunk's output where its input was."""
        self._slots[:, chunk.start : chunk.stop] = hidden

    def last(self) -> Tensor:
        """Hidden state of the last position [B, 1, d_model], a copy: the bridge can be released."""
        return self._slots[:, -1:].clone()

    def all(self) -> Tensor:
        """Hidden states of all positions [B, S, d_model]."""
        return self._slots

    @property
    def nbytes(self) -> int:
        """B * S * d_model * element size (the hidden term of Eq. 9)."""
        return self._slots.nbytes
