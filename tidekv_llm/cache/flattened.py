"""The flattened layout: every KV head keeps as many positions as its own budget says, and not a byte more.

The kept prompt is stored once, head after head, and never copied again. Decoded tokens, equally many for all
heads, go into a rectangular tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionParams, BoundKeys, Scratch
from tidekv_llm.cache.few_tokens import FEW, attend_to_rows
from tidekv_llm.cache.head_attention import head_attention
from tidekv_llm.cache.layer import StoredLayer, grown
from tidekv_llm.cache.rows import FlatRows, PromptRows, QuantisedRows, restore_rows


class FlattenedLayer(StoredLayer):
    """One layer's retained keys and values, heads of different lengths.

    ``update`` returns the tail alone, in a wrapper that knows its layer: under our attention function
    (``with tidekv_attention(model): model.generate(...)``) the wrapper leads back here; any other attention
    function that touches it gets an error instead of silently attending to the tail only.

    Args:
        keys: [B, Hkv, S, D] of the full layer; the kept rows are copied out.
        values: [B, Hkv, S, Dv].
        heads: kept positions of each head, row by row: B * Hkv ascending int64 tensors.
        reserve: slots to allocate for decoded tokens.

    Attributes:
        kept_positions: int32, all heads after one another.
        rows: the kept prompt.
        residual: newest kept positions that lie in the tail, in full precision (0 unless quantised).
    """

    layout = "flattened"

    def __init__(self, keys: Tensor, values: Tensor, heads: Sequence[Tensor], *, reserve: int) -> None:
        super().__init__(keys.shape[2], keys.dtype, keys.device, None)
        self.kv_heads, self.residual, self._new = keys.shape[1], 0, 0
        self.tail_keys = keys.new_empty((*keys.shape[:2], reserve, keys.shape[3]))
        self.tail_values = values.new_empty((*values.shape[:2], reserve, values.shape[3]))
        self.kept_positions = torch.cat(list(heads)).to(torch.int32)
        self.head_lens = tuple(len(positions) for positions in heads)
        self.rows: PromptRows = FlatRows.gather(list(keys.flatten(0, 1)), list(values.flatten(0, 1)), heads)

    @property
    def cu_klen(self) -> Tensor:
        """Prefix sums of ``head_lens``, int32 [B * Hkv + 1]: heads that keep 3, 1, 2 give [0, 3, 4, 6]."""
        lengths = torch.tensor((0, *self.head_lens), dtype=torch.int32, device=self.kept_positions.device)
        return lengths.cumsum(0, dtype=torch.int32)

    @property
    def max_klen(self) -> int:
        """Kept positions of the longest head."""
        return max(self.head_lens)

    @property
    def physical(self) -> int:
        """Slots in use per head, on average, rounded up."""
        return -(-sum(self.head_lens) // len(self.head_lens)) + self._new

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new tokens [B, Hkv, C, D] to the tail, in place."""
        count = key_states.shape[2]
        self.reserve(count)
        start, end = self._used, self._used + count
        self.tail_keys[:, :, start:end] = key_states
        self.tail_values[:, :, start:end] = value_states
        self._new += count
        self.logical += count
        return BoundKeys.of(self.tail_keys[:, :, :end], self), self.tail_values[:, :, :end]

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more tokens; copies the tail when it is too small, never the prompt."""
        self.tail_keys = grown(self.tail_keys, self._used, count)
        self.tail_values = grown(self.tail_values, self._used, count)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention of the newest tokens over everything stored (:class:`tidekv_llm.hf.LayerState`)."""
        if self._scratch is None:
            self._scratch = Scratch()
        tail = (self.tail_keys[:, :, : self._used], self.tail_values[:, :, : self._used])
        return head_attention(query, self.rows, tail, params, self._scratch)

    def step(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Append and attend; a few tokens are compared with all heads' rows in one product."""
        if query.shape[0] > 1 or query.shape[2] > FEW:
            return super().step(query, key, value, params)
        self.update(key, value)
        tail = (self.tail_keys[:, :, : self._used], self.tail_values[:, :, : self._used])
        return attend_to_rows(query, self.rows, tail, params)

    def rollback(self, count: int) -> None:
        """Forget the newest ``count`` decoded tokens."""
        self.logical, self._new = self.logical - count, self._new - count

    def retain(self, heads: Sequence[Tensor]) -> None:
        """Keep only these positions of each head; before anything is decoded or quantised."""
        old = torch.split(self.kept_positions.long(), list(self.head_lens))
        slots = [torch.searchsorted(*pair) for pair in zip(old, heads, strict=True)]
        keys, values = zip(*(self.rows.head(index) for index in range(len(slots))), strict=True)
        self.rows = FlatRows.gather(keys, values, slots)
        self.kept_positions = torch.cat(list(heads)).to(torch.int32)
        self.head_lens = tuple(len(positions) for positions in heads)

    def quantise(self, bits: int, *, residual: int) -> None:
        """Pack the prompt into 8, 4 or 2 bits, all but each head's ``residual`` newest positions. Once."""
        assert self._new == 0, "quantise before decoding"
        heads = [self.rows.head(index) for index in range(len(self.head_lens))]
        self.residual = residual = min(residual, *self.head_lens)
        room = self.tail_keys.shape[2]
        self.tail_keys = self.tail_keys.new_empty(_with_slots(self.tail_keys, residual + room))
        self.tail_values = self.tail_values.new_empty(_with_slots(self.tail_values, residual + room))
        for index, (keys, values) in enumerate(heads):
            row, head = divmod(index, self.kv_heads)
            self.tail_keys[row, head, :residual] = keys[len(keys) - residual :]
            self.tail_values[row, head, :residual] = values[len(values) - residual :]
        older = [(keys[: len(keys) - residual], values[: len(values) - residual]) for keys, values in heads]
        self.rows = QuantisedRows.of(older, bits)

    def keys_of(self, head: int, row: int = 0) -> Tensor:
        """Keys that one head holds: [slots in use, D], a copy (expanded, if quantised)."""
        return torch.cat((self.rows.head(self._index(head, row))[0], self.tail_keys[row, head, : self._used]))

    def values_of(self, head: int, row: int = 0) -> Tensor:
        """Values that one head holds: [slots in use, Dv], a copy (expanded, if quantised)."""
        return torch.cat((self.rows.head(self._index(head, row))[1], self.tail_values[row, head, : self._used]))

    def kept_of(self, head: int, row: int = 0) -> Tensor:
        """Positions of the prompt that one head holds: int64 [kept]."""
        return torch.split(self.kept_positions, list(self.head_lens))[self._index(head, row)].long()

    @property
    def nbytes(self) -> int:
        """Bytes of the prompt's rows and of the tail in use."""
        per_slot = self.tail_keys.shape[3] + self.tail_values.shape[3]
        slots = len(self.head_lens) * self._used
        return self.rows.nbytes + slots * per_slot * self.tail_keys.element_size()

    def reset(self) -> None:
        """Forget the decoded tokens; the prompt's kept ones stay."""
        self.logical, self._new = self.prompt_length, 0

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = self.rows.state()
        tensors = {f"rows.{name}": tensor for name, tensor in tensors.items()}
        tensors["kept_positions"] = self.kept_positions
        tensors["tail_keys"] = self.tail_keys[:, :, : self._used]
        tensors["tail_values"] = self.tail_values[:, :, : self._used]
        mine = {"prompt_length": self.prompt_length, "logical": self.logical, "head_lens": self.head_lens}
        return tensors, {**mine, "residual": self.residual, "rows": facts}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> FlattenedLayer:
        layer = cls.__new__(cls)
        keys = tensors["tail_keys"]
        StoredLayer.__init__(layer, facts["prompt_length"], keys.dtype, keys.device, None)
        layer.kv_heads, layer.residual = keys.shape[1], facts["residual"]
        layer.tail_keys, layer.tail_values = keys, tensors["tail_values"]
        layer.kept_positions, layer.head_lens = tensors["kept_positions"], tuple(facts["head_lens"])
        stored = {name.removeprefix("rows."): tensor for name, tensor in tensors.items() if "rows." in name}
        layer.rows = restore_rows(stored, facts["rows"])
        if layer.rows.dtype != keys.dtype:
            raise ValueError(f"the prompt is stored in {layer.rows.dtype}, later tokens in {keys.dtype}")
        layer.logical = facts["logical"]
        layer._new = keys.shape[2] - layer.residual
        return layer

    @property
    def _used(self) -> int:
        """Slots of the tail in use."""
        return self.residual + self._new

    def _index(self, head: int, row: int) -> int:
        return row * self.kv_heads + head


def _with_slots(tensor: Tensor, slots: int) -> tuple[int, ...]:
    return (*tensor.shape[:2], slots, tensor.shape[3])
