"""One prefill, many caches: every finished layer goes to several layer ends, to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.full_layer import Accumulator, FullLayer, LayerEnd
from tidekv_llm.cache.layer import StoredLayer


class FanOut:
    """A :class:`LayerEnd` of several; the hidden states do not depend on what is evicted (Algorithm 1).

    The scheduler's own cache holds the last one's layers.

    Args:
        ends: at least one, all for the same prompt.

    Attributes:
        caches: what each of them kept, in the same order.
    """

    def __init__(self, ends: Sequence[LayerEnd]) -> None:
        self._ends = tuple(ends)
        self.caches = [CompressedCache() for _ in self._ends]

    @property
    def evidence(self) -> None:
        """Each end has its own."""

    @property
    def window_size(self) -> int:
        """The widest observation window; each end looks at its own part of it."""
        return max(end.window_size for end in self._ends)

    def accumulator(self) -> _Accumulators:
        """All ends' accumulators behind one."""
        return _Accumulators([end.accumulator() for end in self._ends])

    def compress(self, layer: FullLayer, window: int | None) -> StoredLayer:
        """Let every end keep its own choice of ``layer``."""
        assert isinstance(layer.accumulated, _Accumulators)
        for end, cache, gathered in zip(self._ends, self.caches, layer.accumulated.parts, strict=True):
            cache.commit(end.compress(replace(layer, accumulated=gathered), window))
        return self.caches[-1].layer(-1)


class _Accumulators:
    def __init__(self, parts: Sequence[Accumulator | None]) -> None:
        self.parts = parts

    def add(self, query: Tensor, keys: Tensor, params: AttentionParams) -> None:
        for part in self.parts:
            if part is not None:
                part.add(query, keys, params)
