"""The rectangular layout: every KV head of a layer keeps equally many positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionDispatch, AttentionParams, Scratch
from tidekv_llm.cache.few_tokens import FEW, attend_to_slots
from tidekv_llm.cache.layer import StoredLayer, grown


class RectangularLayer(StoredLayer):
    """One layer's retained keys and values, with room for the tokens to come.

    Args:
        keys: [B, Hkv, S, D] of the full layer; the kept rows are copied out.
        values: [B, Hkv, S, Dv].
        kept_indices: int64 [B, Hkv, K], ascending.
        reserve: slots to allocate for decoded tokens.
        window: sliding window in tokens, for layers that have one.
    """

    layout = "rectangular"

    def __init__(
        self, keys: Tensor, values: Tensor, kept_indices: Tensor, *, reserve: int, window: int | None = None
    ) -> None:
        super().__init__(keys.shape[2], keys.dtype, keys.device, window)
        self._keep(keys, values, kept_indices, kept_indices, reserve)

    def _keep(self, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, reserve: int) -> None:
        self.kept_length = self._physical = slots.shape[-1]
        self.kept_positions = positions.to(torch.int32)
        self.keys = _gather(keys, slots, reserve)
        self.values = _gather(values, slots, reserve)

    @property
    def physical(self) -> int:
        """Slots in use."""
        return self._physical

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new tokens [B, Hkv, C, D] in place and return views of everything stored."""
        count = key_states.shape[2]
        self.reserve(count)
        end = self._physical + count
        self.keys[:, :, self._physical : end] = key_states
        self.values[:, :, self._physical : end] = value_states
        self._physical = end
        self.logical += count
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens; copies only when the storage is too small."""
        self.keys = grown(self.keys, self._physical, count)
        self.values = grown(self.values, self._physical, count)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention of new tokens over the kept ones (:class:`tidekv_llm.hf.LayerState`)."""
        attention, scratch = self._attention or AttentionDispatch(), self._scratch or Scratch()
        return attention.attend(query, key, value, params, scratch)[0]

    def step(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Append and attend; a few tokens are compared with all heads' slots in one product."""
        if query.shape[2] > FEW:
            return super().step(query, key, value, params)
        self.update(key, value)
        return attend_to_slots(query, self.keys, self.values, self._physical, params)

    def rollback(self, count: int) -> None:
        """Forget the newest ``count`` decoded tokens."""
        self.logical, self._physical = self.logical - count, self._physical - count

    def retain(self, heads: Sequence[Tensor]) -> None:
        """Keep only these positions of each head, equally many; before anything is decoded."""
        wanted = torch.stack(list(heads)).view(*self.kept_positions.shape[:2], -1)
        slots = torch.searchsorted(self.kept_positions.long(), wanted)
        self._keep(self.keys, self.values, slots, wanted, self.keys.shape[2] - self.kept_length)

    def keys_of(self, head: int, row: int = 0) -> Tensor:
        """Keys that one head holds: a view [slots in use, D]."""
        return self.keys[row, head, : self._physical]

    def values_of(self, head: int, row: int = 0) -> Tensor:
        """Values that one head holds: a view [slots in use, Dv]."""
        return self.values[row, head, : self._physical]

    def kept_of(self, head: int, row: int = 0) -> Tensor:
        """Positions of the prompt that one head holds: int64 [kept]."""
        return self.kept_positions[row, head].long()

    def positions(self) -> Tensor:
        """True absolute positions int64 [B, Hkv, slots in use], ascending."""
        new = torch.arange(self.prompt_length, self.logical, device=self.kept_positions.device)
        kept = self.kept_positions.long()
        return torch.cat((kept, new.expand(*kept.shape[:2], -1)), dim=-1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        per_slot = (self.keys[:, :, 0].numel() + self.values[:, :, 0].numel()) * self.keys.element_size()
        return self._physical * per_slot

    def reset(self) -> None:
        """Forget the decoded tokens; the prompt's kept ones stay."""
        self.logical, self._physical = self.prompt_length, self.kept_length

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {
            "keys": self.keys[:, :, : self._physical],
            "values": self.values[:, :, : self._physical],
            "kept_positions": self.kept_positions,
        }
        return tensors, {"prompt_length": self.prompt_length, "logical": self.logical, "window": self.window}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> RectangularLayer:
        layer = cls.__new__(cls)
        keys = tensors["keys"]
        StoredLayer.__init__(layer, facts["prompt_length"], keys.dtype, keys.device, facts["window"])
        layer.keys, layer.values = keys, tensors["values"]
        layer.kept_positions = tensors["kept_positions"]
        layer.kept_length, layer._physical = layer.kept_positions.shape[-1], keys.shape[2]
        layer.logical = facts["logical"]
        return layer


def _gather(full: Tensor, kept: Tensor, reserve: int) -> Tensor:
    """Copy the kept rows of [B, H, S, D] into fresh storage [B, H, K + reserve, D]."""
    batch, heads, _, dim = full.shape
    count = kept.shape[-1]
    out = full.new_empty((batch, heads, count + reserve, dim))
    out[:, :, count:] = 0  # a product may run over free slots, and zero times what lies there must be zero
    for row in range(batch):
        for head in range(heads):
            torch.index_select(full[row, head], 0, kept[row, head], out=out[row, head, :count])
    return out
