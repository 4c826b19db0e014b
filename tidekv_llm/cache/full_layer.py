"""A layer's end: one layer's complete prompt, and what it is handed to.

Prefill and compression meet here and know nothing else of each other: whoever fills a layer gives a
:class:`FullLayer` to a :class:`LayerEnd` and gets what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.passages import Passages


class Accumulator(Protocol):
    """What a layer end gathers of one layer while its chunks go by, for methods that need every query."""

    def add(self, query: Tensor, keys: Tensor, params: AttentionParams) -> None:
        """Take in a chunk: rotated queries [B, Hq, C, D], the last C positions of ``keys`` [B, Hkv, L, D]."""


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
        passages: lines and sentences of the prompt, or None where its text is not known.
    """

    index: int
    num_layers: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    lse: Tensor | None
    params: AttentionParams
    accumulated: Any = None
    passages: Passages | None = None

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


class LayerEnd(Protocol):
    """What becomes of every finished layer of one prompt."""

    @property
    def window_size(self) -> int:
        """W: how many of the prompt's last queries it wants to see in ``FullLayer.queries``."""

    @property
    def evidence(self) -> Tensor | None:
        """Float32 [S] on the CPU: the scores each position was kept for so far, or None where nobody looks."""

    def accumulator(self) -> Accumulator | None:
        """What to feed with the next layer's chunks; it comes back as ``FullLayer.accumulated``."""

    def compress(self, layer: FullLayer, window: int | None) -> StoredLayer:
        """Copy what stays of ``layer`` into storage of its own; ``window`` is its sliding window, if it has one."""
