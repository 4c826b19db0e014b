"""What every layout of a layer's retained keys and values has in common.

Two lengths are kept apart (paper, section 5, decode adapter): the *logical* one, tokens seen, from which true
absolute positions follow, and the *physical* one, slots in storage. Example: 64 prompt tokens of which 16 are
kept: the next token has position 64 and goes into slot 16.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from tidekv_llm.attention import AttentionDispatch, AttentionParams, Scratch


class StoredLayer(CacheLayerMixin):
    """One layer of a :class:`~tidekv_llm.cache.compressed.CompressedCache`, in any layout.

    Attributes:
        layout: the layout's name in saved files.
        prompt_length: S.
        logical: tokens seen, prompt and decoded.
        window: sliding window in tokens, for layers that have one.
    """

    is_croppable = False
    layout: str

    def __init__(self, prompt_length: int, dtype: torch.dtype, device: torch.device, window: int | None) -> None:
        super().__init__()
        self.prompt_length = self.logical = prompt_length
        self.window = window
        self.is_sliding = window is not None
        self.dtype, self.device = dtype, device
        self.is_initialized = True
        self._attention: AttentionDispatch | None = None
        self._scratch: Scratch | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage exists from the start."""

    def bind(self, attention: AttentionDispatch, scratch: Scratch) -> None:
        """Set what :meth:`attend` computes with."""
        self._attention, self._scratch = attention, scratch

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention of new tokens over the kept ones (:class:`tidekv_llm.hf.LayerState`)."""

    def step(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Append new tokens' keys and values [B, Hkv, C, D] and attend with their queries: [B, C, Hq, Dv]."""
        keys, values = self.update(key, value)
        return self.attend(query, keys, values, params)

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Forget the newest ``count`` decoded tokens; their slots are written again."""

    @abstractmethod
    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens."""

    @abstractmethod
    def retain(self, heads: Sequence[Tensor]) -> None:
        """Keep only these positions of each head, B * Hkv ascending int64 tensors; before anything is decoded."""

    @abstractmethod
    def keys_of(self, head: int, row: int = 0) -> Tensor:
        """Keys that one head holds: [slots in use, D]."""

    @abstractmethod
    def values_of(self, head: int, row: int = 0) -> Tensor:
        """Values that one head holds: [slots in use, Dv]."""

    @abstractmethod
    def kept_of(self, head: int, row: int = 0) -> Tensor:
        """True absolute positions of the prompt that one head holds: int64 [kept], ascending."""

    def positions_of(self, head: int, row: int = 0) -> Tensor:
        """True absolute positions int64 [slots in use], ascending: kept ones, then decoded ones."""
        kept = self.kept_of(head, row)
        return torch.cat((kept, torch.arange(self.prompt_length, self.logical, device=kept.device)))

    @property
    @abstractmethod
    def physical(self) -> int:
        """Slots in use per head, on average, rounded up."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the keys and values in use, with what is needed to read them."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON-ready facts from which :meth:`restore` makes the same layer."""

    @classmethod
    @abstractmethod
    def restore(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> StoredLayer:
        """The layer that :meth:`state` described."""

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


def grown(tensor: Tensor, used: int, count: int) -> Tensor:
    """Storage [B, H, slots, D] with room for ``count`` more after ``used``; copied only if it is too small.

    It then grows by at least half of what is used, so that appending token by token copies seldom.
    """
    missing = used + count - tensor.shape[2]
    if missing <= 0:
        return tensor
    room = max(missing, used // 2)
    return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:2], room, tensor.shape[3]))), dim=2)
