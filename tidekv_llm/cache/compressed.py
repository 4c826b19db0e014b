"""The compressed cache of a whole model: what prefill returns, decode reads and ``generate()`` takes."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from tidekv_llm.cache.rectangular import RectangularLayer


class CompressedCache(Cache):
    """One retained layer after another, committed in order by the scheduler.

    It is a transformers ``Cache``: pass it as ``cache`` (``past_key_values`` before 5.24) to
    ``model.generate()`` together with the prompt's ids and one more token.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def commit(self, layer: RectangularLayer) -> None:
        """Add the next finished layer."""
        self.layers.append(layer)

    def layer(self, index: int) -> RectangularLayer:
        """The stored layer ``index``."""
        layer: RectangularLayer = self.layers[index]
        return layer

    def positions(self, layer: int, head: int) -> Tensor:
        """True absolute positions that one head holds: int64 [kept], ascending."""
        return self.layer(layer).positions()[0, head]

    def keys(self, layer: int, head: int) -> Tensor:
        """Keys that one head holds: [kept, head_dim]."""
        stored = self.layer(layer)
        return stored.keys[0, head, : stored.physical]

    def values(self, layer: int, head: int) -> Tensor:
        """Values that one head holds: [kept, head_dim]."""
        stored = self.layer(layer)
        return stored.values[0, head, : stored.physical]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def kept_tokens(self) -> int:
        """Positions in use in the fullest layer."""
        return max((layer.physical for layer in self.layers), default=0)

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens in every layer."""
        for layer in self.layers:
            layer.reserve(count)
