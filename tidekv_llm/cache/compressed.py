"""The compressed cache of a whole model: what prefill returns, decode reads and ``generate()`` takes."""

from __future__ import annotations

import os

from torch import Tensor
from transformers.cache_utils import Cache

from tidekv_llm.cache.cache_file import CacheOwner, read_layers, write_layers
from tidekv_llm.cache.layer import StoredLayer


class CompressedCache(Cache):
    """One retained layer after another, committed in order by the scheduler.

    It is a transformers ``Cache``: pass it as ``cache`` (``past_key_values`` before 5.24) to
    ``model.generate()`` together with the prompt's ids and one more token. If heads keep different numbers of
    positions, or the cache is quantised, wrap that call in ``with tidekv_attention(model):``; without it the first
    step raises :class:`CacheError`.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def commit(self, layer: StoredLayer) -> None:
        """Add the next finished layer."""
        self.layers.append(layer)

    def layer(self, index: int) -> StoredLayer:
        """The stored layer ``index``."""
        layer: StoredLayer = self.layers[index]
        return layer

    def positions(self, layer: int, head: int) -> Tensor:
        """True absolute positions that one head holds: int64 [kept], ascending."""
        return self.layer(layer).positions_of(head)

    def keys(self, layer: int, head: int) -> Tensor:
        """Keys that one head holds: [kept, head_dim]."""
        return self.layer(layer).keys_of(head)

    def values(self, layer: int, head: int) -> Tensor:
        """Values that one head holds: [kept, head_dim]."""
        return self.layer(layer).values_of(head)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def kept_tokens(self) -> int:
        """Positions in use per head in the fullest layer."""
        return max((layer.physical for layer in self.layers), default=0)

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens in every layer."""
        for layer in self.layers:
            layer.reserve(count)

    def rollback(self, count: int) -> None:
        """Forget the newest ``count`` decoded tokens in every layer."""
        for layer in self.layers:
            layer.rollback(count)

    def save(self, path: str | os.PathLike[str], owner: CacheOwner) -> None:
        """Write the cache to one safetensors file, readable by the user alone.

        Args:
            path: the file; it appears whole or not at all.
            owner: the model it belongs to; ``llm.cache_owner`` has it.

        Raises:
            CacheError: it cannot be written.
        """
        write_layers(path, self.layers, owner)

    @classmethod
    def load(cls, path: str | os.PathLike[str], owner: CacheOwner, *, device: str = "cpu") -> CompressedCache:
        """Read a cache that :meth:`save` wrote for the same model.

        Raises:
            CacheError: no such file, truncated, foreign, of another version or of another model.
        """
        cache = cls()
        cache.layers.extend(read_layers(path, owner, device))
        return cache
