"""A layer is made ready: its weights lie dense, in the dtype it is computed in, while it is at work.

Layer-major order needs each layer once per prompt, for all chunks in a row. So weights can lie in any dtype or
:class:`~tidekv_llm.weights.forms.Form`: those of the layer at work are made in one buffer that all layers reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tidekv_llm.weights.forms import Form, forms_of

# Every weight begins at a multiple of so many bytes, as an allocator would put it.
ALIGNMENT = 64


@dataclass(frozen=True)
class Slot:
    """One tensor of a layer that cannot be computed with as it lies.

    Attributes:
        tensor: the parameter or buffer; its shape is the dense one.
        form: what it is made of; None for its own numbers in another dtype.
    """

    tensor: Tensor
    form: Form | None

    def make(self, out: Tensor) -> None:
        """Write the dense numbers into ``out``, of the tensor's shape."""
        if self.form is None:
            out.copy_(self.tensor.detach())
        else:
            self.form.make(out)

    def room(self, dtype: torch.dtype) -> int:
        """Bytes of the buffer that it takes in a dtype."""
        return -(-self.tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def slots_of(layer: nn.Module, dtype: torch.dtype) -> tuple[Slot, ...]:
    """What must be made before a layer can compute in ``dtype``; each tensor once."""
    found = {id(slot.tensor): slot for slot in _slots(layer, dtype)}
    return tuple(found.values())


def _slots(layer: nn.Module, dtype: torch.dtype) -> Iterator[Slot]:
    for module in layer.modules():
        if isinstance(module, Form):
            continue
        forms = forms_of(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_floating_point():
                continue
            if name in forms or tensor.dtype != dtype:
                yield Slot(tensor, forms.get(name))


def buffer_bytes(layers: nn.ModuleList, dtype: torch.dtype) -> int:
    """Bytes of the buffer: what the largest layer must be made of."""
    return max(sum(slot.room(dtype) for slot in slots_of(layer, dtype)) for layer in layers)


class ReadyLayers:
    """The buffer of one prompt, through which the layers pass; it is freed with this object.

    Args:
        layers: a model's decoder layers.
        dtype: what they compute in.
    """

    def __init__(self, layers: nn.ModuleList, dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._buffers: dict[torch.device, Tensor] = {}

    @contextmanager
    def ready(self, index: int) -> Iterator[None]:
        """Layer ``index`` computes in the dtype while the block runs; whatever happens, it lies as before then."""
        slots = slots_of(self._layers[index], self._dtype)
        views, stored = self._views(slots), [slot.tensor.data for slot in slots]
        try:
            for slot, view in zip(slots, views, strict=True):
                slot.make(view)
                slot.tensor.data = view
            yield
        finally:
            for slot, data in zip(slots, stored, strict=True):
                slot.tensor.data = data

    def _views(self, slots: tuple[Slot, ...]) -> list[Tensor]:
        """Room for each slot, in its shape, one after another in the buffer of its device."""
        views, used = [], dict[torch.device, int]()
        for slot in slots:
            device, start = slot.tensor.device, used.get(slot.tensor.device, 0)
            flat = self._buffer(device)[start : start + slot.tensor.numel() * self._dtype.itemsize]
            views.append(flat.view(self._dtype).view(slot.tensor.shape))
            used[device] = start + slot.room(self._dtype)
        return views

    def _buffer(self, device: torch.device) -> Tensor:
        if device not in self._buffers:
            size = buffer_bytes(self._layers, self._dtype)
            self._buffers[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffers[device]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, 0 as long as nothing was to be made."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def convertible(layers: nn.ModuleList) -> bool:
    """Whether layers can be made ready: their weights are plain tensors that lie where they are computed with."""
    for module in layers.modules():
        if hasattr(module, "_hf_hook"):  # accelerate brings these weights from elsewhere
            return False
        for tensor in module.parameters(recurse=False):
            if not tensor.is_floating_point() or hasattr(tensor, "__tensor_flatten__"):
                return False
    return True
