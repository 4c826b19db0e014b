"""Where a flattened layer keeps the prompt: rows of all heads after one another, plain or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

# Tokens that share one scale per channel (keys), and channels that share one per token (values).
GROUP = 64


class PromptRows(Protocol):
    """Keys and values of B * Hkv heads, each of its own length; immutable."""

    head_lens: tuple[int, ...]
    dtype: torch.dtype

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys [n, D] and values [n, Dv] of head ``index`` (row * Hkv + head)."""

    def all(self) -> tuple[Tensor, Tensor]:
        """Keys [sum of lengths, D] and values [sum of lengths, Dv] of all heads after one another."""

    @property
    def owner(self) -> Tensor:
        """The head that each of those rows belongs to: uint8 [sum of lengths], int32 where heads are many."""

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON-ready facts."""


class FlatRows:
    """One tensor for all heads and their prefix sums.

    Example: heads that keep 3, 1 and 2 positions have ``cu_klen`` [0, 3, 4, 6] and ``max_klen`` 3.

    Args:
        keys: [sum of lengths, D].
        values: [sum of lengths, Dv].
        head_lens: rows of each head.
    """

    def __init__(self, keys: Tensor, values: Tensor, head_lens: Sequence[int]) -> None:
        self.keys, self.values, self.head_lens = keys, values, tuple(head_lens)
        self._starts = list(accumulate(self.head_lens, initial=0))
        self.cu_klen = torch.tensor(self._starts, dtype=torch.int32, device=keys.device)
        self.max_klen = max(self.head_lens, default=0)
        self.dtype = keys.dtype

    @classmethod
    def gather(cls, keys: Sequence[Tensor], values: Sequence[Tensor], slots: Sequence[Tensor]) -> FlatRows:
        """Copy the rows ``slots`` [n] out of every head's keys [S, D] and values [S, Dv], without a detour."""
        lengths = [len(each) for each in slots]
        rows = cls(
            keys[0].new_empty((sum(lengths), keys[0].shape[-1])),
            values[0].new_empty((sum(lengths), values[0].shape[-1])),
            lengths,
        )
        for index, kept in enumerate(slots):
            here = slice(rows._starts[index], rows._starts[index + 1])
            torch.index_select(keys[index], 0, kept, out=rows.keys[here])
            torch.index_select(values[index], 0, kept, out=rows.values[here])
        return rows

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        here = slice(self._starts[index], self._starts[index + 1])
        return self.keys[here], self.values[here]

    def all(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    @cached_property
    def owner(self) -> Tensor:
        return _owner(self.head_lens, self.keys.device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"keys": self.keys, "values": self.values}, {"rows": "flat", "head_lens": self.head_lens}


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole numbers of 8, 4 or 2 bits, several to a byte, with the float16 scale and zero of each group.

    Attributes:
        codes: uint8 [rows, columns * bits / 8].
        scale: float16, broadcastable to the grouped rows.
        zero: float16, the group's smallest value.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    @classmethod
    def joined(cls, parts: Sequence[Packed]) -> Packed:
        """Several after one another."""
        codes, scale, zero = zip(*((part.codes, part.scale, part.zero) for part in parts), strict=True)
        return cls(torch.cat(codes), torch.cat(scale), torch.cat(zero))

    def part(self, rows: slice, group: int) -> Packed:
        """The groups that hold ``rows``, whole ones of ``group`` rows: views."""
        groups = slice(rows.start // group, rows.stop // group)
        return Packed(self.codes[rows], self.scale[groups], self.zero[groups])


class QuantisedRows:
    """Keys per channel and values per token, as in KIVI (arXiv 2402.02750); each value is rounded once.

    Every 64 tokens of a head share a scale per key channel; every 64 channels of a token share one per value.
    All heads lie after one another, the keys of each filled up to whole groups: one head or all are expanded at once
    when they are read.
    """

    def __init__(
        self, keys: Sequence[Packed], values: Sequence[Packed], value_dim: int, bits: int, dtype: torch.dtype
    ) -> None:
        self._value_dim, self.bits, self.dtype = value_dim, bits, dtype
        self.head_lens = tuple(packed.codes.shape[0] for packed in values)
        self._key_starts = list(accumulate((packed.codes.shape[0] for packed in keys), initial=0))
        self._value_starts = list(accumulate(self.head_lens, initial=0))
        self._keys, self._values = Packed.joined(keys), Packed.joined(values)

    @classmethod
    def of(cls, heads: Sequence[tuple[Tensor, Tensor]], bits: int) -> QuantisedRows:
        """Quantise heads (keys [n, D], values [n, Dv])."""
        keys = [quantise_per_channel(head, bits) for head, _ in heads]
        values = [quantise_per_token(head, bits) for _, head in heads]
        return cls(keys, values, heads[0][1].shape[1], bits, heads[0][0].dtype)

    def head(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = self._packed(index)
        return (
            expand_per_channel(keys, self.head_lens[index], self.bits, self.dtype),
            expand_per_token(values, self._value_dim, self.bits, self.dtype),
        )

    def all(self) -> tuple[Tensor, Tensor]:
        keys = expand_per_channel(self._keys, self._key_starts[-1], self.bits, self.dtype)
        if self._key_starts != self._value_starts:  # without the rows that fill up a head's last group
            starts = zip(self._key_starts, self.head_lens, strict=False)
            keys = torch.cat([keys[start : start + length] for start, length in starts])
        return keys, expand_per_token(self._values, self._value_dim, self.bits, self.dtype)

    @cached_property
    def owner(self) -> Tensor:
        return _owner(self.head_lens, self._values.codes.device)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return self._keys.nbytes + self._values.nbytes

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {}
        for index in range(len(self.head_lens)):
            for kind, packed in zip(("keys", "values"), self._packed(index), strict=True):
                for part in ("codes", "scale", "zero"):
                    tensors[f"{kind}.{index}.{part}"] = getattr(packed, part)
        facts = {"rows": "quantised", "bits": self.bits, "dtype": str(self.dtype).removeprefix("torch.")}
        return tensors, {**facts, "head_lens": self.head_lens, "value_dim": self._value_dim}

    def _packed(self, index: int) -> tuple[Packed, Packed]:
        """One head's keys and values: views."""
        first, end = self._key_starts[index : index + 2]
        rows = slice(self._value_starts[index], self._value_starts[index + 1])
        return self._keys.part(slice(first, end), GROUP), self._values.part(rows, 1)


def _owner(head_lens: Sequence[int], device: torch.device) -> Tensor:
    heads = torch.arange(len(head_lens), dtype=torch.uint8 if len(head_lens) < 256 else torch.int32, device=device)
    return heads.repeat_interleave(torch.tensor(head_lens, device=device))


def restore_rows(tensors: dict[str, Tensor], facts: dict[str, Any]) -> PromptRows:
    """The rows whose ``state()`` this is."""
    if facts["rows"] == "flat":
        return FlatRows(tensors["keys"], tensors["values"], facts["head_lens"])

    def packed(kind: str) -> list[Packed]:
        return [
            Packed(*(tensors[f"{kind}.{index}.{part}"] for part in ("codes", "scale", "zero")))
            for index in range(len(facts["head_lens"]))
        ]

    return QuantisedRows(
        packed("keys"), packed("values"), facts["value_dim"], facts["bits"], getattr(torch, facts["dtype"])
    )


def quantise_per_channel(matrix: Tensor, bits: int) -> Packed:
    """Groups of 64 rows, one scale per column of each: codes [groups * 64, ...] of a matrix [n, D]."""
    padding = -matrix.shape[0] % GROUP
    if padding and matrix.shape[0]:  # repeated rows change no minimum and no maximum
        matrix = torch.cat((matrix, matrix[-1:].expand(padding, -1)))
    grouped = matrix.float().view(matrix.shape[0] // GROUP, GROUP, matrix.shape[-1])
    return _quantise(grouped, 1, bits, matrix.shape)


def expand_per_channel(packed: Packed, count: int, bits: int, dtype: torch.dtype) -> Tensor:
    """The first ``count`` rows back, [count, D]."""
    codes = unpack_bits(packed.codes, bits, packed.scale.shape[-1])
    grouped = codes.reshape(codes.shape[0] // GROUP, GROUP, codes.shape[-1])
    return _expand(grouped, packed, dtype).view(codes.shape)[:count]


def quantise_per_token(matrix: Tensor, bits: int) -> Packed:
    """Every row on its own, in groups of 64 columns where that divides them."""
    width = GROUP if matrix.shape[1] % GROUP == 0 else matrix.shape[1]
    grouped = matrix.float().view(matrix.shape[0], matrix.shape[1] // width, width)
    return _quantise(grouped, 2, bits, matrix.shape)


def expand_per_token(packed: Packed, columns: int, bits: int, dtype: torch.dtype) -> Tensor:
    """All rows back, [n, columns]."""
    groups = packed.scale.shape[1]
    codes = unpack_bits(packed.codes, bits, columns)
    grouped = codes.reshape(codes.shape[0], groups, columns // groups)
    return _expand(grouped, packed, dtype).view(codes.shape)


def _quantise(grouped: Tensor, dim: int, bits: int, shape: torch.Size) -> Packed:
    # Codes are computed from the scale and zero as they are stored, so that rounding those costs nothing more.
    low, high = grouped.amin(dim, keepdim=True), grouped.amax(dim, keepdim=True)
    zero = low.half()
    scale = ((high - zero.float()) / (2**bits - 1)).half()
    step = scale.float().masked_fill(scale == 0, 1.0)
    codes = ((grouped - zero.float()) / step).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return Packed(pack_bits(codes.view(shape), bits), scale, zero)


def _expand(codes: Tensor, packed: Packed, dtype: torch.dtype) -> Tensor:
    expanded: Tensor = codes.float().mul_(packed.scale).add_(packed.zero)
    return expanded.to(dtype)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 [n, D] of values below ``2**bits`` to uint8 [n, ceil(D * bits / 8)], the first one lowest."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte))
    parts = codes.view(codes.shape[0], codes.shape[1] // per_byte, per_byte)
    packed = parts[..., 0].clone()
    for place in range(1, per_byte):
        packed |= parts[..., place] << (place * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, columns: int) -> Tensor:
    """What :func:`pack_bits` packed: uint8 [n, columns]."""
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.flatten(1)[:, :columns]
