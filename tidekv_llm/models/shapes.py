"""The dimensions of a model, from a loaded one or from its config alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from tidekv_llm.memory import weight_bytes
from tidekv_llm.shapes import ModelShape

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from tidekv_llm.hf import Decoder

RANDOM_PREFIX = "random:"
_SHIPPED = Path(__file__).parents[1] / "planner_configs"


def shape_of(decoder: Decoder, nbytes: int) -> ModelShape:
    """The dimensions of a loaded model whose weights take ``nbytes``."""
    return ModelShape(
        num_layers=decoder.num_layers,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        hidden_size=decoder.hidden_size,
        intermediate_size=_active_intermediate(decoder.config),
        element_bytes=decoder.dtype.itemsize,
        weight_bytes=nbytes,
        windows=tuple(decoder.sliding_window(layer) for layer in range(decoder.num_layers)),
        max_positions=int(getattr(decoder.config, "max_position_embeddings", 0) or 0),
        ready_bytes=decoder.buffer_bytes,
        computed_bytes=decoder.compute_dtype.itemsize,
    )


def shape_of_config(
    config: PretrainedConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    compute_dtype: str | None = None,
    weight_bits: int = 16,
) -> ModelShape:
    """The dimensions of a model that is not loaded: nothing but shapes is built.

    Args:
        config: a transformers config, its dict, or a config.json.
        dtype: what the weights would be loaded as.
        compute_dtype: what layers would be computed in; None for the same.
        weight_bits: 16, or what the weights would be quantised to.

    Raises:
        ConfigError: the config cannot be read, or an option is impossible.
        UnsupportedModelError: a family that is unknown or that the engine would refuse.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tidekv_llm.hf import Decoder
    from tidekv_llm.weights.dtypes import floating_dtype
    from tidekv_llm.weights.quantise import check_bits

    chosen = floating_dtype("dtype", dtype)
    computed = chosen if compute_dtype is None else floating_dtype("compute_dtype", compute_dtype)
    check_bits(weight_bits)
    full = _as_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(full, dtype=chosen)
    shape = shape_of(Decoder(model, computed), weight_bytes(model))
    return shape if weight_bits == 16 else _in_bits(shape, model, computed, weight_bits)


def _in_bits(shape: ModelShape, model: PreTrainedModel, computed: torch.dtype, bits: int) -> ModelShape:
    """The shape of a model whose every layer is made of quantised weights."""
    from tidekv_llm.hf import Decoder
    from tidekv_llm.weights.quantise import quantised_bytes

    whole = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in Decoder(model).layers)
    return replace(shape, weight_bytes=quantised_bytes(model, bits), ready_bytes=whole * computed.itemsize)


def _active_intermediate(config: Any) -> int:
    """Width of the MLP activations of one token."""
    width = int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size)
    experts = getattr(config, "num_experts_per_tok", None)
    if experts:
        width = int(experts) * int(getattr(config, "moe_intermediate_size", None) or width)
    return width


def _as_config(config: PretrainedConfig | Mapping[str, Any] | str | os.PathLike[str]) -> Any:
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(config, PretrainedConfig):
        return config
    fields = dict(config) if isinstance(config, Mapping) else _read_json(Path(config))
    family = fields.pop("model_type", None)
    if not isinstance(family, str):
        raise ConfigError("the config has no model_type; take the model's own config.json")
    for name in ("torch_dtype", "dtype", "transformers_version", "quantization_config", "auto_map"):
        fields.pop(name, None)
    try:
        return AutoConfig.for_model(family, **fields)
    except ValueError as error:
        raise UnsupportedModelError(f"model_type={family!r} is unknown to this transformers release") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a config.json ({type(error).__name__})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is no config.json: it holds a {type(fields).__name__}")
    return fields


@cache
def shipped_names() -> tuple[str, ...]:
    """Models whose config ships with the package: ``random:NAME`` has random weights of that shape."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.json")))


def find_config(model: str, *, layers: int | None = None) -> Any:
    """The transformers config of a model, without weights.

    Args:
        model: ``random:NAME`` or an alias of a shipped config, a config.json, a folder with one, or a hub id.
        layers: another number of layers.

    Raises:
        ConfigError: a config.json that cannot be read.
        ModelNotFoundError: nothing by that name; the message says what was tried.
    """
    name = model.removeprefix(RANDOM_PREFIX)
    path = Path(model)
    if name in shipped_names():
        config = _as_config(_SHIPPED / f"{name}.json")
    elif model.startswith(RANDOM_PREFIX):
        raise ModelNotFoundError(f"{model}: no such shape; the shipped ones are {', '.join(shipped_names())}")
    elif path.is_dir():
        config = _as_config(path / "config.json")
    elif path.suffix == ".json":
        config = _as_config(path)
    else:
        config = _hub_config(model)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[index % len(config.layer_types)] for index in range(layers)]
    return config


def _hub_config(model: str) -> Any:
    from transformers import AutoConfig

    from tidekv_llm.models.sources import resolve

    resolve(model)  # one quick look: transformers would try a hub that cannot be reached for half a minute
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        raise ModelNotFoundError(
            f"{model}: no config found; tried the shipped ones ({', '.join(shipped_names())}), a local config.json, "
            f"and the hub ({type(error).__name__})"
        ) from error
