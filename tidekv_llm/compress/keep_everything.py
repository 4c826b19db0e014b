"""The layer end that keeps every position: what the controls without eviction store."""

from __future__ import annotations

from dataclasses import dataclass

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.cache.layer import StoredLayer


@dataclass(frozen=True)
class KeepEverything:
    """Copies a finished layer's full keys and values into storage of its own (:class:`LayerEnd`).

    Args:
        window_size: W, last prompt tokens that the last layer computes outputs for.
        reserve: slots for decoded tokens.
        storage: on the device, or :class:`~tidekv_llm.cache.growing.OffloadedLayer`.
    """

    window_size: int
    reserve: int
    storage: type[GrowingLayer] = GrowingLayer
    evidence: None = None

    def accumulator(self) -> None:
        """Nobody scores."""

    def compress(self, layer: FullLayer, window: int | None) -> StoredLayer:
        stored = self.storage(layer.prompt_length + self.reserve, window=window)
        stored.update(layer.keys, layer.values)
        stored.seal()
        return stored
