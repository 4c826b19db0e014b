"""A model's weights in 8 or 4 bits: the matrices of its layers, its embedding and its head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tidekv_llm.errors import ConfigError
from tidekv_llm.weights.forms import GROUP, Form, forms_of, quantised, tile_rows
from tidekv_llm.weights.stored import StoredEmbedding, StoredLinear, make_when_called, put_form

BITS = (16, 8, 4)


def check_bits(bits: object) -> None:
    """Refuse a number of bits that weights cannot be stored in.

    Raises:
        ConfigError: it is none of 16, 8 and 4.
    """
    if isinstance(bits, bool) or bits not in BITS:
        raise ConfigError(f"weight_bits={bits!r} must be 16 (as in the checkpoint), 8 or 4")


@torch.no_grad()
def quantise_model(model: Any, bits: int) -> None:
    """Store a loaded model's weights in so many bits, one after another."""
    for name, parameter in list(model.named_parameters()):
        if (form := form_for(model, name, parameter, bits)) is not None:
            place_form(model, name, form)
    tie_forms(model)


def form_for(model: nn.Module, name: str, weight: Tensor, bits: int) -> Form | None:
    """The form of a parameter; None for norms, biases and routers, which stay as they are: they are small.

    Embedding and head take 8 bits at least: every token's numbers pass through them, and there are but two of them.
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    if type(owner) is nn.Linear and name.endswith("weight"):
        return quantised(weight, bits if ".layers." in name else 8)
    if isinstance(owner, nn.Embedding):
        return quantised(weight, 8)
    return quantised(weight, bits) if weight.dim() == 3 else None


def quantised_bytes(model: nn.Module, bits: int) -> int:
    """Bytes of a model's distinct parameters once they lie in so many bits; of one without numbers too."""
    kinds = {id(owner.weight): owner for owner in model.modules() if isinstance(owner, (nn.Linear, nn.Embedding))}
    total = 0
    for name, parameter in model.named_parameters():
        rows = parameter.numel() // parameter.shape[-1]
        if id(parameter) in kinds or parameter.dim() == 3:
            fits = parameter.dim() == 2 and rows % tile_rows() == 0 and parameter.shape[1] % GROUP == 0
            four = bits == 4 and fits and ".layers." in name
            total += parameter.numel() * 5 // 8 if four else parameter.numel() + 2 * rows
        else:
            total += parameter.nbytes
    return total


def place_form(model: nn.Module, name: str, form: Form) -> None:
    """Let the parameter called ``name`` lie as ``form``, in a module that knows how to compute with it."""
    path, _, own_name = name.rpartition(".")
    owner = model.get_submodule(path)
    if type(owner) is nn.Linear:
        model.set_submodule(path, StoredLinear(form, owner.bias, owner.weight.dtype))
    elif isinstance(owner, nn.Embedding):
        model.set_submodule(path, StoredEmbedding(owner, form))
    elif forms_of(owner):
        put_form(owner, own_name, form)
    else:
        put_form(owner, own_name, form)
        make_when_called(owner)


def tie_forms(model: Any) -> None:
    """Let a head that shares the embedding's weight share its form."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, StoredEmbedding) and type(head) is nn.Linear:
        form = forms_of(embedding.own)["weight"]
        model.set_output_embeddings(StoredLinear(form, head.bias, head.weight.dtype))
