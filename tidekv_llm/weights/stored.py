"""A model's modules on weights that are stored in forms: transformers' own, and linear maps that read the form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tidekv_llm.weights.forms import FORMS, Form, forms_of


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter that says shape, dtype and device, and has no numbers: who computes with it gets NaN."""
    return nn.Parameter(torch.full((1,), float("nan"), dtype=dtype, device=device).expand(shape), requires_grad=False)


def put_form(module: nn.Module, name: str, form: Form) -> None:
    """Let a module's parameter lie as ``form``; made dense it is where somebody makes it so."""
    parameter: Tensor = getattr(module, name)
    if not hasattr(module, FORMS):
        module.add_module(FORMS, nn.ModuleDict())
    getattr(module, FORMS)[name] = form
    setattr(module, name, placeholder(form.shape, parameter.dtype, next(form.buffers()).device))


class StoredLinear(nn.Linear):
    """A linear map whose weight lies in a form; while its layer is ready, an ordinary one.

    Args:
        form: of the weight [d_out, d_in].
        bias: [d_out], or None.
        dtype: of the model.
    """

    def __init__(self, form: Form, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__(form.shape[1], form.shape[0], bias=False, device="meta", dtype=dtype)
        self.register_parameter("bias", bias)
        put_form(self, "weight", form)

    def forward(self, input: Tensor) -> Tensor:
        if not lacks_numbers(self.weight):
            return functional.linear(input, self.weight, self.bias)
        output = forms_of(self)["weight"].multiply(input)
        return output if self.bias is None else output + self.bias


class StoredEmbedding(nn.Module):
    """An embedding whose rows are made when tokens ask for them, on the model's own module.

    Args:
        embedding: the model's, whatever it does besides looking up.
        form: of its weight [vocabulary, d_model].
    """

    def __init__(self, embedding: nn.Embedding, form: Form) -> None:
        super().__init__()
        self.own = embedding
        embedding.padding_idx = None  # of training; it could not be one of the few rows
        put_form(embedding, "weight", form)

    @property
    def weight(self) -> Tensor:
        """The placeholder, for those who ask for its dtype or device."""
        return self.own.weight

    def forward(self, input: Tensor) -> Tensor:
        rows = forms_of(self.own)["weight"].rows(input.flatten()).to(self.own.weight.dtype)
        stored = self.own.weight.data
        self.own.weight.data = rows
        try:
            found: Tensor = self.own(torch.arange(len(rows), device=rows.device).view(input.shape))
        finally:
            self.own.weight.data = stored
        return found


def lacks_numbers(tensor: Tensor) -> bool:
    """Whether a parameter is a placeholder just now."""
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def make_when_called(module: nn.Module) -> None:
    """Let a module of the model's own, experts say, find its weights dense whenever it runs."""
    held: list[Any] = []

    def before(module: nn.Module, inputs: Any) -> None:
        held.append(_made(forms_of(module), module))
        held[-1].__enter__()

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        held.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


@contextmanager
def _made(forms: Mapping[str, Form], module: nn.Module) -> Iterator[None]:
    lacking = {name: getattr(module, name) for name in forms if lacks_numbers(getattr(module, name))}
    stored = {name: parameter.data for name, parameter in lacking.items()}
    try:
        for name, parameter in lacking.items():
            parameter.data = forms[name].dense(parameter.dtype)
        yield
    finally:
        for name, parameter in lacking.items():
            parameter.data = stored[name]
