"""How much arithmetic a chunk is: the weights of the progress fraction."""

from __future__ import annotations

from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunks import Chunk


class WorkMeter:
    """Counts the share of multiply-adds done: linear in the chunk plus attention over its causal history."""

    def __init__(self, decoder: Decoder, chunks: tuple[Chunk, ...]) -> None:
        self._linear = sum(parameter.numel() for parameter in decoder.layers.parameters()) / decoder.num_layers
        self._attention = 2 * decoder.num_heads * decoder.head_dim
        self._total = decoder.num_layers * sum(self.cost(chunk) for chunk in chunks)
        self._done = 0.0

    def cost(self, chunk: Chunk) -> float:
        """Multiply-adds of one layer over a chunk."""
        return len(chunk) * (self._linear + self._attention * (chunk.start + len(chunk) / 2))

    def finish(self, chunk: Chunk) -> float:
        """Count a finished chunk and return the fraction done."""
        self._done += self.cost(chunk)
        return min(1.0, self._done / self._total)
