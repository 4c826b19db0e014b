"""One prefill, many caches: every finished layer goes to several compressors, to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.compress.selectors import Accumulator


class FanOut:
    """Stands in for a :class:`Compressor`; the hidden states do not depend on what is evicted (Algorithm 1).

    The scheduler's own cache holds the last compressor's layers.

    Args:
        compressors: at least one, all for the same prompt.

    Attributes:
        caches: what each compressor kept, in the same order.
    """

    def __init__(self, compressors: Sequence[Compressor]) -> None:
        self._compressors = tuple(compressors)
        self.caches = [CompressedCache() for _ in self._compressors]
        self.evidence: Tensor | None = None

    @property
    def window_size(self) -> int:
        """The widest observation window; each compressor looks at its own part of it."""
        return max(compressor.window_size for compressor in self._compressors)

    def accumulator(self) -> _Accumulators:
        """All compressors' accumulators behind one."""
        return _Accumulators([compressor.accumulator() for compressor in self._compressors])

    def compress(self, layer: FullLayer, window: int | None) -> StoredLayer:
        """Let every compressor keep its own choice of ``layer``."""
        assert isinstance(layer.accumulated, _Accumulators)
        for compressor, cache, gathered in zip(
            self._compressors, self.caches, layer.accumulated.parts, strict=True
        ):
            cache.commit(compressor.compress(replace(layer, accumulated=gathered), window))
        return self.caches[-1].layer(-1)


class _Accumulators:
    def __init__(self, parts: Sequence[Accumulator | None]) -> None:
        self.parts = parts

    def add(self, query: Tensor, keys: Tensor, params: AttentionParams) -> None:
        for part in self.parts:
            if part is not None:
                part.add(query, keys, params)
