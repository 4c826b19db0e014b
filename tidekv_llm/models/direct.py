"""Weights read one by one into a model without numbers: never more in memory than what stays and one tensor.

transformers' own loader holds a model as dense numbers before anything can be made of them. Here each parameter is
read, turned into the form in which it stays, and forgotten. That needs a source that names its tensors as the model
does; where one does not (experts that a checkpoint holds one by one), the ordinary way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tidekv_llm.weights.forms import Form
from tidekv_llm.weights.quantise import form_for, place_form, tie_forms

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class WeightSource(Protocol):
    """Tensors by the model's names."""

    names: Collection[str]

    def read(self, name: str) -> Tensor | Form:
        """A weight as it is stored there, or the form it stays in."""


class SafetensorsFolder:
    """The tensors of a folder's safetensors files; a file is open only while one of its tensors is read.

    Args:
        folder: with one or several files.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))
        self.names: Collection[str] = self._files.keys()

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def empty_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model with its buffers, and parameters that have shapes only."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def wanted_names(model: PreTrainedModel) -> list[str]:
    """The parameters to be read; of tied ones the first."""
    return [name for name, _ in model.named_parameters()]


def can_read(model: PreTrainedModel, source: WeightSource) -> bool:
    """Whether a source has everything that the model saves, under the same names."""
    buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    return not buffers and set(wanted_names(model)) <= set(source.names)


@torch.no_grad()
def fill(
    model: PreTrainedModel,
    source: WeightSource,
    bits: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> PreTrainedModel:
    """Put every weight in its place, in ``bits`` bits or in the form that the source gives.

    Args:
        model: from :func:`empty_model`.
        source: one that :func:`can_read` says yes to.
        bits: 16 for dense numbers in the model's dtype, 8 or 4.
        report: called with how many weights are in place, and of how many.
    """
    names = wanted_names(model)
    for number, name in enumerate(names, start=1):
        _place(model, name, source.read(name), bits)
        report(number, len(names))
    tie_forms(model)
    model.tie_weights()
    return model


def _place(model: Any, name: str, weight: Tensor | Form, bits: int) -> None:
    path, _, own_name = name.rpartition(".")
    owner, shape = model.get_submodule(path), model.get_parameter(name).shape
    if weight.shape != shape:
        raise ValueError(f"{name} has the shape {tuple(weight.shape)}, not {tuple(shape)} (ignore_mismatched_sizes)")
    if isinstance(weight, Tensor) and bits < 16:
        weight = form_for(model, name, weight, bits) or weight
    if isinstance(weight, Form):
        place_form(model, name, weight)
    else:
        dense = weight.to(model.dtype, copy=True)
        owner.register_parameter(own_name, nn.Parameter(dense, requires_grad=False))
