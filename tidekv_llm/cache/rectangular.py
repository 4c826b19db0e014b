"""The rectangular layout: every KV head of a layer keeps equally many positions.

Two lengths are kept apart (paper, section 5, decode adapter): the *logical* one, tokens seen, from which true
absolute positions follow, and the *physical* one, slots in storage. Example: 64 prompt tokens of which 16 are
kept: the next token has position 64 and goes into slot 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tidekv_llm.attention import AttentionDispatch, AttentionParams, Scratch


class RectangularLayer(CacheLayerMixin):
    """One layer's retained keys and values, with room for the tokens to come.

    Args:
        keys: [B, Hkv, S, D] of the full layer; the kept rows are copied out.
        values: [B, Hkv, S, Dv].
        kept_indices: int64 [B, Hkv, K], ascending.
        reserve: slots to allocate for decoded tokens.
        window: sliding window in tokens, for layers that have one.
    """

    is_croppable = False

    def __init__(
        self, keys: Tensor, values: Tensor, kept_indices: Tensor, *, reserve: int, window: int | None = None
    ) -> None:
        super().__init__()
        self.prompt_length = keys.shape[2]
        self.kept_length = kept_indices.shape[-1]
        self.window = window
        self.is_sliding = window is not None
        self.logical = self.prompt_length
        self.physical = self.kept_length
        self.kept_positions = kept_indices.to(torch.int32)
        self.keys = _gather(keys, kept_indices, reserve)
        self.values = _gather(values, kept_indices, reserve)
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._attention: AttentionDispatch | None = None
        self._scratch: Scratch | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new tokens [B, Hkv, C, D] in place and return views of everything stored."""
        count = key_states.shape[2]
        self.reserve(count)
        end = self.physical + count
        self.keys[:, :, self.physical : end] = key_states
        self.values[:, :, self.physical : end] = value_states
        self.physical = end
        self.logical += count
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens; copies only when the storage is too small, and then doubles the room."""
        missing = self.physical + count - self.keys.shape[2]
        if missing > 0:
            room = max(missing, self.physical // 2)
            self.keys = torch.cat((self.keys, self.keys.new_empty(_with_length(self.keys, room))), dim=2)
            self.values = torch.cat((self.values, self.values.new_empty(_with_length(self.values, room))), dim=2)

    def bind(self, attention: AttentionDispatch, scratch: Scratch) -> None:
        """Set what :meth:`attend` computes with."""
        self._attention, self._scratch = attention, scratch

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention of new tokens over the kept ones (:class:`tidekv_llm.hf.LayerState`)."""
        assert self._attention is not None and self._scratch is not None
        return self._attention.attend(query, key, value, params, self._scratch)[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen: from here transformers takes the next position."""
        return self.logical

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots and the position of slot 0 as a causal mask should see it.

        The offset puts new tokens at their true positions, so that several at once stay causal, and every kept
        slot before them. Example: 16 of 64 kept, 2 new: 18 slots from offset 48, the new ones at 64 and 65.
        """
        return self.physical + query_length, self.logical - self.physical

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def get_max_cache_shape(self) -> int:
        """What transformers 5.12 calls :meth:`get_max_length`; abstract there."""
        return -1

    def positions(self) -> Tensor:
        """True absolute positions int64 [B, Hkv, slots in use], ascending."""
        new = torch.arange(self.prompt_length, self.logical, device=self.kept_positions.device)
        kept = self.kept_positions.long()
        return torch.cat((kept, new.expand(*kept.shape[:2], -1)), dim=-1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""
        per_slot = (self.keys[:, :, 0].numel() + self.values[:, :, 0].numel()) * self.keys.element_size()
        return self.physical * per_slot

    def reset(self) -> None:
        """Forget the decoded tokens; the prompt's kept ones stay."""
        self.logical, self.physical = self.prompt_length, self.kept_length


def _gather(full: Tensor, kept: Tensor, reserve: int) -> Tensor:
    """Copy the kept rows of [B, H, S, D] into fresh storage [B, H, K + reserve, D]."""
    batch, heads, _, dim = full.shape
    count = kept.shape[-1]
    out = full.new_empty((batch, heads, count + reserve, dim))
    for row in range(batch):
        for head in range(heads):
            torch.index_select(full[row, head], 0, kept[row, head], out=out[row, head, :count])
    return out


def _with_length(tensor: Tensor, length: int) -> tuple[int, ...]:
    return (*tensor.shape[:2], length, tensor.shape[3])
