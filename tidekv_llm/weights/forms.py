"""What a weight may lie in memory as, other than as itself: a form that dense numbers can be made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

FORMS = "tidekv_forms"
GROUP = 32
# Rows of a tile in which torch's CPU kernel for 4 bits wants its codes, by the instructions that torch uses.
_TILE_ROWS = {"AVX512": 64, "AVX2": 32}
# Rows up to which the packed kernels are quicker than dense numbers made for the purpose.
_FEW_ROWS = 16
# Rows of a matrix that are turned from one form into another at once.
_TILE = 1024


class Form(nn.Module):
    """A weight as it is stored. What it holds are buffers, so that a model's bytes and devices count them."""

    @abstractmethod
    def make(self, out: Tensor) -> None:
        """Write the dense weight into ``out``, of its shape and any floating dtype."""

    @abstractmethod
    def rows(self, index: Tensor) -> Tensor:
        """Dense rows float32 [T, K] of a matrix [N, K] at ``index`` int64 [T]."""

    def multiply(self, hidden: Tensor) -> Tensor:
        """``hidden`` [..., K] times the transposed matrix: [..., N], in the dtype of ``hidden``."""
        rows = hidden.numel() // hidden.shape[-1]
        # In float32 the packed kernels are ten times slower, and whoever chose it wants its accuracy.
        packed = hidden.dtype == torch.bfloat16 and hidden.device.type == "cpu" and has_packed_kernels()
        if packed and rows <= _FEW_ROWS:
            return self._packed(hidden.reshape(rows, -1)).view(*hidden.shape[:-1], -1)
        return functional.linear(hidden, self.dense(hidden.dtype))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in a new tensor."""
        out = torch.empty(self.shape, dtype=dtype, device=next(self.buffers()).device)
        self.make(out)
        return out

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Of the dense weight."""

    @abstractmethod
    def _packed(self, hidden: Tensor) -> Tensor:
        """Bfloat16 ``hidden`` [T, K] to [T, N] by a kernel that reads the stored codes."""


class Int8(Form):
    """Eight bits a number and a bfloat16 scale per row: ``w = code * scale``.

    Attributes:
        codes: int8, of the weight's shape.
        scales: bfloat16, one for each vector of the last dimension.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        """The nearest codes of a weight of any shape."""
        matrix = weight.detach().reshape(-1, weight.shape[-1])
        made = cls.of_rows(matrix.shape, lambda start, stop: matrix[start:stop].float())
        return cls(made.codes.view(weight.shape), made.scales.view(weight.shape[:-1]))

    @classmethod
    def of_rows(cls, shape: torch.Size, rows: Callable[[int, int], Tensor]) -> Int8:
        """The nearest codes of a matrix whose rows [start, stop) come in float32, a tile at a time."""
        codes, scales = torch.empty(shape, dtype=torch.int8), torch.empty(shape[0], dtype=torch.bfloat16)
        for start in range(0, shape[0], _TILE):
            stop = min(start + _TILE, shape[0])
            tile = rows(start, stop)
            # The codes are chosen for the scale as it is rounded, so rounding it costs no accuracy.
            scales[start:stop] = tile.abs().amax(-1).div_(127).clamp_min_(1e-30)
            codes[start:stop] = (tile / scales[start:stop, None].float()).round_().clamp_(-127, 127)
        return cls(codes, scales)

    def make(self, out: Tensor) -> None:
        out.copy_(self.codes).mul_(self.scales[..., None].to(out.dtype))

    def rows(self, index: Tensor) -> Tensor:
        return self.codes[index].float().mul_(self.scales[index].float()[:, None])

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def _packed(self, hidden: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(hidden, self.codes, self.scales)


class Int4(Form):
    """Four bits a number, a scale and a zero for every 32 of a row: ``w = (code - 8) * scale + zero``.

    Attributes:
        codes: uint8 [N / tile, K, tile / 2], the low four bits of the tile's first half of rows, the high ones of its
            second: torch's own layout for the kernel.
        scales_zeros: bfloat16 [K / 32, N, 2].
    """

    codes: Tensor
    scales_zeros: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """From codes uint8 [N, K], scales and zeros bfloat16 [N, K / 32]."""
        super().__init__()
        (rows, columns), tile = codes.shape, tile_rows()
        halves = codes.view(rows // tile, 2, tile // 2, columns)
        packed = (halves[:, 0] | halves[:, 1] << 4).transpose(1, 2).contiguous()
        self.register_buffer("codes", packed)
        self.register_buffer("scales_zeros", torch.stack((scales.t(), zeros.t()), -1).contiguous())

    @classmethod
    def of(cls, weight: Tensor) -> Int4:
        """The nearest codes of a matrix [N, K]; N a multiple of the tile, K of 32."""
        groups = weight.detach().float().view(weight.shape[0], -1, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).clamp_min(1e-30).bfloat16()
        zeros = (low + 8 * scales.float()).bfloat16()
        codes = groups.sub(zeros.float()[..., None]).div_(scales.float()[..., None]).round_().add_(8).clamp_(0, 15)
        return cls(codes.to(torch.uint8).view(weight.shape), scales, zeros)

    def make(self, out: Tensor) -> None:
        tiles, columns, half = self.codes.shape
        halves = out.view(tiles, 2, half, columns)
        halves[:, 0].copy_((self.codes & 15).transpose(1, 2))
        halves[:, 1].copy_((self.codes >> 4).transpose(1, 2))
        scales, zeros = (part.t().to(out.dtype)[..., None] for part in self.scales_zeros.unbind(-1))  # [N, K / 32, 1]
        out.view(out.shape[0], -1, GROUP).sub_(8).mul_(scales).add_(zeros)

    def rows(self, index: Tensor) -> Tensor:
        half = self.codes.shape[2]
        pairs = self.codes[index // (2 * half), :, index % half]  # [T, K]
        codes = torch.where((index % (2 * half) < half)[:, None], pairs & 15, pairs >> 4).float()
        scales, zeros = (part.t()[index].float()[..., None] for part in self.scales_zeros.unbind(-1))
        return codes.view(len(index), -1, GROUP).sub_(8).mul_(scales).add_(zeros).flatten(1)

    @property
    def shape(self) -> torch.Size:
        tiles, columns, half = self.codes.shape
        return torch.Size((2 * half * tiles, columns))

    def _packed(self, hidden: Tensor) -> Tensor:
        packed = self.codes.view(self.shape[0], -1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return cast(Tensor, multiply(hidden, packed, GROUP, self.scales_zeros))


def quantised(weight: Tensor, bits: int) -> Form:
    """A weight in 8 or 4 bits; what has no 4-bit layout (rows or columns that do not fill its tiles) takes 8."""
    fits = weight.dim() == 2 and weight.shape[0] % tile_rows() == 0 and weight.shape[1] % GROUP == 0
    return Int4.of(weight) if bits == 4 and fits else Int8.of(weight)


def tile_rows() -> int:
    """Rows of a tile of 4-bit codes here."""
    return _TILE_ROWS.get(torch.backends.cpu.get_cpu_capability(), 64)


def has_packed_kernels() -> bool:
    """Whether torch multiplies packed codes quickly on this CPU: elsewhere its kernels are plain loops."""
    return torch.backends.cpu.get_cpu_capability() in _TILE_ROWS


def forms_of(module: nn.Module) -> Mapping[str, Form]:
    """The forms of a module's parameters by name; a parameter without one is stored as it is."""
    return dict(getattr(module, FORMS, nn.ModuleDict()).items())
