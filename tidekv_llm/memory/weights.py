"""The size of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the distinct storages behind a model's parameters and buffers; tied weights count once.

    Buffers that a module names in ``mapped`` are pages of a file, which the system takes back when it needs them.
    """
    sizes: dict[tuple[str, int], int] = {}
    for tensor in _plain_tensors(model):
        storage = tensor.untyped_storage()
        # Meta storages all sit at address 0; their own identity tells them apart.
        address = storage.data_ptr() or storage._cdata
        sizes[str(tensor.device), address] = storage.nbytes()
    return sum(sizes.values())


def _plain_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        mapped: frozenset[str] = getattr(module, "mapped", frozenset())
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in mapped:
                yield from _flatten(tensor)


def _flatten(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors inside a tensor; quantised ones are wrappers around several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _flatten(getattr(tensor, name))
