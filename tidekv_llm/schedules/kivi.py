"""``kivi``: the whole prompt per layer, then 2-bit keys per channel and values per token (KIVI)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.full import keep_everything

GROUP = 32  # numbers that share a scale: tokens of a key channel, channels of a value token
RESIDUAL = 128  # most recent positions that stay in full precision
CODES_PER_BYTE = 4


class Packed2Bit:
    """A tensor [..., n] in 2 bits per number, with a scale and a lowest value per group along the last axis."""

    def __init__(self, full: Tensor, group: int) -> None:
        self._shape, self._dtype, self._group = full.shape, full.dtype, group
        grouped = full.reshape(*full.shape[:-1], -1, group).float()
        self._low: Tensor = grouped.amin(-1, keepdim=True)
        self._scale: Tensor = ((grouped.amax(-1, keepdim=True) - self._low) / 3).clamp_min(1e-8)
        codes = ((grouped - self._low) / self._scale).round_().to(torch.uint8).flatten()
        quarters = codes.view(-1, CODES_PER_BYTE)
        self._codes: Tensor = quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6
        self._low, self._scale = self._low.to(full.dtype), self._scale.to(full.dtype)

    def full(self) -> Tensor:
        """The numbers again, rounded to four levels per group."""
        shifts = torch.arange(0, 8, 2, device=self._codes.device, dtype=torch.uint8)
        codes = (self._codes[:, None] >> shifts) & 3
        grouped = codes.view(*self._shape[:-1], -1, self._group).to(self._dtype)
        out: Tensor = grouped * self._scale + self._low
        return out.flatten(-2)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and lowest values."""
        return self._codes.nbytes + self._scale.nbytes + self._low.nbytes


class KiviLayer(GrowingLayer):
    """All positions but the last :data:`RESIDUAL` in 2 bits; decoded tokens join the full-precision tail.

    The packed part is quantised once, when the prompt is through, and unpacked for each decoded token. The original
    also packs decoded tokens, 128 at a time; answers here are shorter than that matters.
    """

    def __init__(self, capacity: int, *, window: int | None = None) -> None:
        super().__init__(capacity, window=window)
        self._packed: tuple[Packed2Bit, Packed2Bit] | None = None
        self._packed_length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The layer end calls this with the whole prompt, decode with each token."""
        if self.is_initialized:
            super().update(key_states, value_states)
            return self._everything()
        length = key_states.shape[2]
        packed = max(0, length - RESIDUAL) // GROUP * GROUP
        self.capacity -= packed
        super().update(key_states[:, :, packed:], value_states[:, :, packed:])
        self.logical = length
        if packed:
            keys = Packed2Bit(key_states[:, :, :packed].transpose(2, 3), GROUP)  # per channel: groups of tokens
            dim = value_states.shape[-1]
            values = Packed2Bit(value_states[:, :, :packed], GROUP if dim % GROUP == 0 else dim)
            self._packed, self._packed_length = (keys, values), packed
        return key_states, value_states

    def _everything(self) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[:, :, : self.physical], self.values[:, :, : self.physical]
        if self._packed is None:
            return keys, values
        packed_keys, packed_values = self._packed
        return (
            torch.cat((packed_keys.full().transpose(2, 3), keys), dim=2),
            torch.cat((packed_values.full(), values), dim=2),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.logical + query_length, 0

    def _stored_positions(self) -> Tensor:
        shape = (self.keys.shape[0], self.keys.shape[1], self.logical)
        return torch.arange(self.logical, device=self.kept_positions.device).expand(shape)

    @property
    def nbytes(self) -> int:
        packed = sum(part.nbytes for part in self._packed) if self._packed else 0
        return packed + super().nbytes


class KiviSchedule:
    """Prefill in full precision, layer by layer; only what decode reads is quantised."""

    name = "kivi"

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        return prefill_layers(decoder, token_ids, keep_everything(job, _kivi), chunk_size=token_ids.shape[1])


def _kivi(capacity: int, window: int | None) -> GrowingLayer:
    return KiviLayer(capacity, window=window)


SCHEDULE = KiviSchedule()
