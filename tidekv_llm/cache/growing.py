"""Full keys and values of a layer that grow chunk by chunk: what chunk-major schedules fill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.cache.rectangular import RectangularLayer


class GrowingLayer(RectangularLayer):
    """Every position is kept; the storage is allocated once, at the first chunk.

    Args:
        capacity: slots to allocate.
        window: sliding window in tokens, for layers that have one (the attention masks, the storage keeps all).
    """

    def __init__(self, capacity: int, *, window: int | None = None) -> None:
        StoredLayer.__init__(self, 0, torch.float32, torch.device("cpu"), window)
        self.capacity = capacity
        self.kept_length = self._physical = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for keys and values shaped like [B, Hkv, C, D]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.kept_positions = torch.empty((*key_states.shape[:2], 0), dtype=torch.int32, device=key_states.device)
        self.is_initialized = True

    def _allocate(self, states: Tensor) -> Tensor:
        return states.new_zeros((*states.shape[:2], self.capacity, states.shape[-1]))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a chunk's keys and values [B, Hkv, C, D]; return views of everything stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return super().update(key_states, value_states)

    def end_chunk(self) -> None:
        """A chunk has been through this layer."""

    def seal(self) -> None:
        """The prompt is through: from here on tokens are decoded."""
        self.prompt_length = self.logical
        self.kept_length = self._physical
        self.kept_positions = self._stored_positions().to(torch.int32)
        self._scratch = None  # the prefill's buffers go; the decode loop binds its own

    def _stored_positions(self) -> Tensor:
        """True positions [B, Hkv, slots in use]."""
        shape = (self.keys.shape[0], self.keys.shape[1], self._physical)
        return torch.arange(self._physical, device=self.kept_positions.device).expand(shape)

    @property
    def nbytes(self) -> int:
        return super().nbytes if self.is_initialized else 0


class OffloadedLayer(GrowingLayer):
    """Full keys and values in host memory (pinned on CUDA), fetched head group by head group.

    The device never holds more of this layer than ``heads_per_group`` KV heads. It decodes in our loop; HF's own
    attention in ``model.generate()`` does not know how to fetch.

    Args:
        capacity: slots to allocate.
        window: sliding window in tokens.
        heads_per_group: KV heads that are on the device together, 0 for all of a layer.
    """

    def __init__(self, capacity: int, *, window: int | None = None, heads_per_group: int = 0) -> None:
        super().__init__(capacity, window=window)
        self.heads_per_group = heads_per_group

    def _allocate(self, states: Tensor) -> Tensor:
        shape = (*states.shape[:2], self.capacity, states.shape[-1])
        return torch.empty(shape, dtype=states.dtype, pin_memory=states.device.type == "cuda")

    def step(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Append and attend, one head group after another."""
        return StoredLayer.step(self, query, key, value, params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention of new tokens, one head group after another; the groups share nothing, so nothing changes."""
        from dataclasses import replace

        assert self._attention is not None and self._scratch is not None
        step, group = self.heads_per_group or key.shape[1], query.shape[1] // key.shape[1]
        if step >= key.shape[1] and key.device == query.device:
            return super().attend(query, key, value, params)
        out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
        for first in range(0, key.shape[1], step):
            heads = slice(first * group, (first + step) * group)
            own = params if params.sinks is None else replace(params, sinks=params.sinks[heads])
            near_key = key[:, first : first + step].to(query.device, non_blocking=True)
            near_value = value[:, first : first + step].to(query.device, non_blocking=True)
            part, _ = self._attention.attend(query[:, heads], near_key, near_value, own, self._scratch)
            out[:, :, heads] = part
        return out
