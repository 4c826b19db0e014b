"""The active layer: the only place where a full prompt's keys and values exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionDispatch, AttentionParams, Scratch
from tidekv_llm.cache.full_layer import Accumulator, FullLayer
from tidekv_llm.hf import KeysValuesOnly


class ActiveLayer:
    """Full K/V of one layer in buffers that are allocated once per request and reused by every layer.

    A decoder layer sees it as its cache (:class:`tidekv_llm.hf.LayerState`).

    Args:
        prompt_length: S, positions to make room for.
        window_size: W, how many of the last prompt positions' queries are kept for scoring.
        attention: backend choice.
        scratch: buffers for temporaries.
        accumulator: makes what the selector wants to be fed with a layer's chunks, if anything.
        slots: buffers that the layers use in turn; two where the next layer's prefix arrives early.
    """

    def __init__(
        self,
        prompt_length: int,
        window_size: int,
        attention: AttentionDispatch,
        scratch: Scratch,
        accumulator: Callable[[], Accumulator | None] = lambda: None,
        slots: int = 1,
    ) -> None:
        self.prompt_length = prompt_length
        self.window_size = min(window_size, prompt_length)
        self.slots = slots
        self._attention = attention
        self._scratch = scratch
        self._buffers: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
        self.outputs_needed = True
        self.index = 0
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._queries: Tensor | None = None
        self._lse: Tensor | None = None
        self._has_lse = True
        self._params: AttentionParams | None = None
        self._make_accumulator = accumulator
        self._accumulator: Accumulator | None = None

    def begin(self, index: int) -> None:
        """Release the previous layer's content and start layer ``index``."""
        self.index, self.length, self.outputs_needed, self._has_lse = index, 0, True, True
        self._accumulator = self._make_accumulator()

    def places(self, index: int, keys: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where layer ``index`` will look for its keys and values, [B, Hkv, S, D] each, in the dtypes of these."""
        slot = (device, index % self.slots)
        if slot not in self._buffers:  # a model spread over devices gets one pair on each
            self._buffers[slot] = (self._empty_like(keys, device), self._empty_like(values, device))
        return self._buffers[slot]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Prompt positions stored so far."""
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append a chunk's keys and values [B, Hkv, C, D]; return views of all so far."""
        keys, values = self._storage(key_states, value_states, key_states.device)
        end = self.length + key_states.shape[2]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention of the chunk that was just stored, keeping what the scoring will need of it."""
        self._params = params
        if self._accumulator is not None:  # also where the last layer needs no outputs
            self._accumulator.add(query, key, params)
        if not self.outputs_needed:
            raise KeysValuesOnly
        rows = max(0, min(query.shape[2], self.length - (self.prompt_length - self.window_size)))
        out, lse = self._attention.attend(query, key, value, params, self._scratch, lse_rows=rows)
        if rows:
            self._keep_window(query[:, :, -rows:], lse)
        return out

    def full_layer(self, num_layers: int) -> FullLayer:
        """What the compressor sees once the last chunk is through."""
        assert self._keys is not None and self._values is not None
        assert self._queries is not None and self._params is not None
        return FullLayer(
            index=self.index,
            num_layers=num_layers,
            keys=self._keys[:, :, : self.length],
            values=self._values[:, :, : self.length],
            queries=self._queries,
            lse=self._lse if self._has_lse else None,
            params=self._params,
            accumulated=self._accumulator,
        )

    @property
    def nbytes(self) -> int:
        """2 * B * Hkv * S * D * element size (the active-KV term of Eq. 9)."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._buffers.values())

    def _storage(self, keys: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        self._keys, self._values = self.places(self.index, keys, values, device)
        return self._keys, self._values

    def _empty_like(self, chunk: Tensor, device: torch.device) -> Tensor:
        return chunk.new_empty((*chunk.shape[:2], self.prompt_length, chunk.shape[-1]), device=device)

    def _keep_window(self, queries: Tensor, lse: Tensor | None) -> None:
        """Store observation queries; a window can span several chunks (chunk size 1, say)."""
        shape = (*queries.shape[:2], self.window_size, queries.shape[-1])
        if self._queries is None or self._queries.device != queries.device or self._queries.shape != shape:
            self._queries = queries.new_empty(shape)
            self._lse = queries.new_empty(shape[:3], dtype=torch.float32)
        end = self.window_size - (self.prompt_length - self.length)
        begin = end - queries.shape[2]
        self._queries[:, :, begin:end] = queries
        if lse is None:
            self._has_lse = False
        elif self._lse is not None:
            self._lse[:, :, begin:end] = lse
