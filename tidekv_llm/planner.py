"""The planner: memory of a construction from the model's dimensions alone (paper, Eq. 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidekv_llm.config import PrefillConfig
from tidekv_llm.memory import available_bytes

if TYPE_CHECKING:
    import torch

    from tidekv_llm.hf import Decoder

CHUNK_SIZES = (2048, 1024, 512, 256, 128)
# Co-resident MLP buffers of one chunk, c in Eq. 9: gate, up and their product.
MLP_BUFFERS = 3
# Float32 copies of a chunk's hidden states that normalisation and residuals hold at once.
HIDDEN_BUFFERS = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions that decide memory; the letters are the paper's."""

    num_layers: int  # N
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    hidden_size: int  # d_model
    intermediate_size: int  # d_ff
    element_bytes: int  # b
    weight_bytes: int

    @classmethod
    def of(cls, decoder: Decoder, weight_bytes: int) -> ModelShape:
        """The dimensions of a loaded model."""
        return cls(
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            hidden_size=decoder.hidden_size,
            intermediate_size=decoder.intermediate_size,
            element_bytes=decoder.dtype.itemsize,
            weight_bytes=weight_bytes,
        )

    def kv_bytes(self, positions: int) -> int:
        """Keys and values of one layer for so many positions: 2 * Hkv * positions * D * b."""
        return 2 * self.num_kv_heads * positions * self.head_dim * self.element_bytes

    def activation_bytes(self, chunk_size: int) -> int:
        """Hidden, MLP and attention buffers of one chunk (the chunk term of Eq. 9)."""
        mlp = MLP_BUFFERS * self.intermediate_size * self.element_bytes
        hidden = HIDDEN_BUFFERS * self.hidden_size * 4
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.element_bytes
        return chunk_size * (mlp + hidden + attention)


def choose_chunk_size(
    shape: ModelShape, prompt_length: int, config: PrefillConfig, device: torch.device | str
) -> int:
    """The largest chunk whose activations stay below the terms that no chunk size can change.

    Larger chunks are faster, but beyond active KV, bridge and retained caches they would decide the peak. If
    memory is short, the chunk also has to fit what is left.
    """
    fixed = shape.kv_bytes(prompt_length) + prompt_length * shape.hidden_size * shape.element_bytes
    kept = shape.num_layers * shape.kv_bytes(min(config.kept_tokens, prompt_length))
    room = min(fixed + kept, max(0, available_bytes(device) - fixed - kept))
    for chunk_size in CHUNK_SIZES:
        if shape.activation_bytes(chunk_size) <= room:
            return chunk_size
    return CHUNK_SIZES[-1]
