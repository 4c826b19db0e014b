"""What a selector sees: one layer's complete prompt, just before it is evicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tidekv_llm.attention import AttentionParams


@dataclass(frozen=True, slots=True)
class FullLayer:
    """The active layer after its last chunk.

    Attributes:
        index: layer number, 0-based.
        num_layers: layers of the model.
        keys: [B, Hkv, S, D], rotated, as the attention used them.
        values: [B, Hkv, S, Dv].
        queries: [B, Hq, W, D], the rotated queries of the last W prompt positions (W <= S).
        lse: float32 [B, Hq, W], log-sum-exp of those queries over their causal keys, or None.
        params: the layer's attention parameters.
        accumulated: what the selector's accumulator gathered over all chunks, or None.
    """

    index: int
    num_layers: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    lse: Tensor | None
    params: AttentionParams
    accumulated: Any = None

    def observed_by(self, window: int) -> FullLayer:
        """The same layer with only the last ``window`` of its observation queries."""
        if window >= self.queries.shape[2]:
            return self
        lse = None if self.lse is None else self.lse[:, :, -window:]
        return replace(self, queries=self.queries[:, :, -window:], lse=lse)

    @property
    def prompt_length(self) -> int:
        """S, prompt positions in this layer."""
        return self.keys.shape[2]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.keys.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.queries.shape[1] // self.keys.shape[1]
