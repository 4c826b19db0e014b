"""The seam between a decode step and its linear maps: whatever module stands there, each called the quickest way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tidekv_llm.hardware import cpu_kind


class Product:
    """One or several linear maps of the same [T, d_in], their outputs after one another: [T, sum of d_out].

    Args:
        modules: a Linear, or what stands in its place (packed weights, an adapter); called as they are.
        alone: whether nothing else computes in this process.
    """

    def __init__(self, modules: Sequence[nn.Module], alone: Callable[[], bool]) -> None:
        self._modules: tuple[Any, ...] = tuple(modules)
        self._alone = alone
        self._streams = all(streams(module) for module in modules)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Outputs [T, sum of d_out] of ``hidden`` [T, d_in]."""
        if self._streams and hidden.shape[0] == 1 and self._alone():
            return without_onednn(lambda: self._outputs(hidden))
        return self._outputs(hidden)

    def _outputs(self, hidden: Tensor) -> Tensor:
        if len(self._modules) == 1:
            output: Tensor = self._modules[0](hidden)
            return output
        return torch.cat([module(hidden) for module in self._modules], dim=-1)


def without_onednn(compute: Callable[[], Tensor]) -> Tensor:
    """Compute with torch's own kernels.

    For a single row in bfloat16 its product streams the weights from memory at 15 GB/s and more on one core, where
    oneDNN's reaches 8; with more rows oneDNN's is the quicker one, soon by ten times. torch's switch is one for the
    whole process: other threads must not compute meanwhile, which would be right and slow.
    """
    torch._C._set_mkldnn_enabled(False)
    try:
        return compute()
    finally:
        torch._C._set_mkldnn_enabled(True)


def streams(module: nn.Module) -> bool:
    """Whether a single row goes through a module faster without oneDNN: bfloat16, where that was measured."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is nn.Linear
        and isinstance(weight, Tensor)
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and cpu_kind() == "avx512_bf16"
        and bool(torch._C._get_mkldnn_enabled())
    )
