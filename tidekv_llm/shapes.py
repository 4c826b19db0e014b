"""A model's dimensions: all that memory depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions that decide memory; the letters are the paper's."""

    num_layers: int  # N
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    hidden_size: int  # d_model
    intermediate_size: int  # d_ff; of a mixture of experts: all experts of one token together
    element_bytes: int  # b, of what is stored: hidden states between layers, keys and values
    weight_bytes: int
    windows: tuple[int | None, ...] = ()  # sliding window per layer; empty: none has one
    max_positions: int = 0  # trained context, 0 if the config does not say
    ready_bytes: int = 0  # of the buffer in which a layer's weights are made ready
    computed_bytes: int = 0  # of a number in a layer at work; 0: as stored

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number in a layer at work."""
        return self.computed_bytes or self.element_bytes

    def kv_bytes(self, positions: int) -> int:
        """Keys and values of one layer for so many positions: 2 * Hkv * positions * D * b."""
        return 2 * self.num_kv_heads * positions * self.head_dim * self.element_bytes

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None for full attention."""
        return self.windows[layer] if self.windows else None
