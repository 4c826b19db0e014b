"""A store in host memory, pinned where there is a CUDA device; optionally in int8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_llm.errors import CacheError
from tidekv_llm.store.base import PrefixStore, StoreKey


class MemoryStore(PrefixStore):
    """One pair of buffers per layer.

    Args:
        key: see :class:`PrefixStore`.
        token_ids: see :class:`PrefixStore`.
        num_layers: see :class:`PrefixStore`.
        int8: store 8-bit integers with one scale per channel (keys) or per token (values): half the bytes of
            bfloat16, and no longer exact.
    """

    kind = "memory"

    def __init__(self, key: StoreKey, token_ids: Sequence[int], num_layers: int, *, int8: bool = False) -> None:
        super().__init__(key, token_ids, num_layers)
        self._int8 = int8
        self._layers: dict[int, tuple[_Plain | _Int8, _Plain | _Int8]] = {}

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        # Keys vary by channel, values by token: the scales follow (selectors.md, KIVI).
        self._layers[layer] = (
            (_Int8.of(keys, dim=2), _Int8.of(values, dim=3)) if self._int8 else (_Plain.of(keys), _Plain.of(values))
        )

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            raise CacheError(f"layer {layer} is not in the document store; open the document again")
        keys, values = self._layers[layer]
        return keys.tensor(), values.tensor()

    def discard(self) -> None:
        self._layers.clear()
        self.complete = False


@dataclass(frozen=True, slots=True)
class _Plain:
    data: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> _Plain:
        pinned = tensor.device.type == "cuda"
        data = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return cls(data.copy_(tensor, non_blocking=pinned))

    def tensor(self) -> Tensor:
        return self.data

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class _Int8:
    data: Tensor
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, dim: int) -> _Int8:
        """Symmetric: ``scale = max|x| / 127`` along ``dim``, ``x ~ scale * data``."""
        scale = tensor.float().abs().amax(dim=dim, keepdim=True).div_(127).clamp_min_(1e-12)
        data = (tensor.float() / scale).round_().to(torch.int8)
        return cls(data.cpu(), scale.cpu(), tensor.dtype)

    def tensor(self) -> Tensor:
        return (self.data.float() * self.scale).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes
