"""Weights as the blocks of a GGUF file: a few dozen numbers each, with a scale and perhaps a zero of their own.

Every covered type is codes, scales and zeros: ``w = code * scale + zero``. Layouts are ggml's (``ggml-common.h``).
"""

from __future__ import annotations

import mmap as mmap_module
import os
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from tidekv_llm.errors import ModelError
from tidekv_llm.weights.forms import Form, Int4, Int8, tile_rows

# Numbers that are made dense at once: their temporaries stay in the cache.
_TILE_NUMBERS = 2**18


@dataclass(frozen=True)
class Unpacked:
    """Blocks taken apart.

    Attributes:
        codes: uint8 or int8 [B, G, n], G groups of n numbers in each of B blocks.
        scales: float32 [B, G, 1].
        zeros: float32 [B, G, 1], or None for 0.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def dense(self) -> Tensor:
        """Float32 [B, G, n]."""
        made = self.codes.float().mul_(self.scales)
        return made if self.zeros is None else made.add_(self.zeros)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, float32 [B, 1, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()[..., None]


def _nibbles(packed: Tensor) -> Tensor:
    """Bytes [..., n] to codes [..., 2, n]: all low halves, then all high ones."""
    return torch.stack((packed & 15, packed >> 4), -2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bytes [B, 4] to the bit 16 or 0 of each of 32 codes, [B, 1, 32]."""
    bits = packed[..., None] >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).view(len(packed), 1, 32)


def _five(blocks: Tensor, at: int) -> Tensor:
    return _nibbles(blocks[:, at + 4 :]).view(-1, 1, 32) | _fifth_bits(blocks[:, at : at + 4])


def _q8_0(blocks: Tensor) -> Unpacked:
    return Unpacked(blocks[:, 2:].view(torch.int8)[:, None], _half(blocks, 0))


def _q4_0(blocks: Tensor) -> Unpacked:
    scales = _half(blocks, 0)
    return Unpacked(_nibbles(blocks[:, 2:]).view(-1, 1, 32), scales, scales * -8)


def _q4_1(blocks: Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 4:]).view(-1, 1, 32), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_five(blocks, 2).view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Unpacked:
    return Unpacked(_five(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _scales_and_zeros(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the K types with 4 and 5 bits, [B, 8, 1] each: six bits for every group, times a float16 per block.

    Twelve bytes: four with the low bits of scales 0 to 3, four with those of the zeros, and four that hold the low
    nibbles of 4 to 7, whose two high bits are the spare ones of the first eight.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), 1).float()[..., None]
    zeros = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), 1).float()[..., None]
    return scales * _half(blocks, 0), zeros * -_half(blocks, 2)


def _q4_k(blocks: Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32), *_scales_and_zeros(blocks))


def _q5_k(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return Unpacked(low | (high & 1) << 4, *_scales_and_zeros(blocks))


def _q6_k(blocks: Tensor) -> Unpacked:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = (low | (high & 3) << 4).view(torch.int8) - 32
    scales = blocks[:, 192:208].view(torch.int8).float()[..., None] * _half(blocks, 208)
    return Unpacked(codes.view(-1, 16, 16), scales)


@dataclass(frozen=True)
class BlockType:
    """A block's size in numbers and bytes, and how it is taken apart."""

    numbers: int
    nbytes: int
    unpack: Callable[[Tensor], Unpacked]
    four_bits: bool = False


BLOCK_TYPES = {
    "Q8_0": BlockType(32, 34, _q8_0), "Q4_0": BlockType(32, 18, _q4_0, True), "Q4_1": BlockType(32, 20, _q4_1, True),
    "Q5_0": BlockType(32, 22, _q5_0), "Q5_1": BlockType(32, 24, _q5_1), "Q4_K": BlockType(256, 144, _q4_k, True),
    "Q5_K": BlockType(256, 176, _q5_k), "Q6_K": BlockType(256, 210, _q6_k),
}  # fmt: skip


class MappedFile:
    """A file whose pages are mapped; it must stay as it was.

    Args:
        path: of the file.
        pages: its mapping, private to this process.
    """

    def __init__(self, path: Path, pages: mmap) -> None:
        self.path, self._state, self._pages = path, _state(path), pages

    def give_back(self) -> None:
        """Let the system have the pages that were read; whoever reads them again gets them from the file."""
        if (advice := getattr(mmap_module, "MADV_DONTNEED", None)) is not None:  # Windows takes them when it wants to
            self._pages.madvise(advice)

    def check(self) -> None:
        """Raise :class:`ModelError` if the file was changed or removed: its numbers would be wrong."""
        try:
            same = _state(self.path) == self._state
        except OSError:
            same = False
        if not same:
            raise ModelError(f"{self.path} was changed while it was in use; load the model again")


def _state(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


class Blocks(Form):
    """A matrix as it lies in a GGUF file, and, once somebody decodes, in the form that packed kernels read.

    Dense numbers are exactly the file's. The packed form has 4-bit codes with their scales as bfloat16, or the
    nearest 8-bit codes: decoding from it reads an eighth of what float32 takes.

    Attributes:
        data: uint8 [N, bytes of a row], mapped or read.
    """

    data: Tensor

    def __init__(self, data: Tensor, kind: str, file: MappedFile | None = None) -> None:
        super().__init__()
        self.register_buffer("data", data)
        self._type, self._file = BLOCK_TYPES[kind], file
        self.packed: Int8 | Int4 | None = None
        # Of names of buffers; their pages are the file's, and are not counted as memory.
        self.mapped = frozenset[str]() if file is None else frozenset({"data"})

    @property
    def shape(self) -> torch.Size:
        rows, row_bytes = self.data.shape
        return torch.Size((rows, row_bytes // self._type.nbytes * self._type.numbers))

    def make(self, out: Tensor) -> None:
        if self._file is not None:
            self._file.check()
        for start, stop in self._tiles():
            out[start:stop] = self._dense(self.data[start:stop])
        if self._file is not None:
            self._file.give_back()

    def rows(self, index: Tensor) -> Tensor:
        return self._dense(self.data[index])

    def _tiles(self) -> list[tuple[int, int]]:
        rows, step = self.shape[0], max(1, _TILE_NUMBERS // self.shape[1])
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _unpack(self, data: Tensor) -> Unpacked:
        return self._type.unpack(data.reshape(-1, self._type.nbytes))

    def _dense(self, data: Tensor) -> Tensor:
        return self._unpack(data).dense().view(len(data), -1)

    def _packed(self, hidden: Tensor) -> Tensor:
        if self.packed is None:
            self.packed = self._pack()
            if self._file is not None:
                self._file.give_back()
        return self.packed._packed(hidden)

    def _pack(self) -> Int8 | Int4:
        if self._file is not None:
            self._file.check()
        if self._type.four_bits and self.shape[0] % tile_rows() == 0:
            return self._as_int4()
        return Int8.of_rows(self.shape, lambda start, stop: self._dense(self.data[start:stop]))

    def _as_int4(self) -> Int4:
        parts = [self._unpack(self.data[start:stop]) for start, stop in self._tiles()]
        rows = self.shape[0]
        codes = torch.cat([part.codes for part in parts]).view(rows, -1)
        scales, zeros = (torch.cat(each).view(rows, -1) for each in zip(*map(_scale_and_zero, parts), strict=True))
        return Int4(codes, scales.bfloat16(), zeros.add_(8 * scales).bfloat16())


def _scale_and_zero(part: Unpacked) -> tuple[Tensor, Tensor]:
    assert part.zeros is not None
    return part.scales, part.zeros
