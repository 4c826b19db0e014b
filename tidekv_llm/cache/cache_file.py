"""Caches on disk: one safetensors file, its facts as JSON in the header.

safetensors holds no code, so a foreign file can be refused but not run. The format's version counts up with every
change; a file of another version is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tidekv_llm.cache.flattened import FlattenedLayer
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.cache.rectangular import RectangularLayer
from tidekv_llm.errors import CacheError, reason
from tidekv_llm.files import written_then_renamed

FORMAT, VERSION = "tidekv-cache", 1
LAYOUTS: dict[str, type[StoredLayer]] = {each.layout: each for each in (RectangularLayer, FlattenedLayer)}


class Model(Protocol):
    """What a cache must share with its model: a :class:`tidekv_llm.hf.Decoder` has it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True)
class CacheOwner:
    """The model a cache belongs to; a cache is only read for an equal one."""

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, model: Model, name: str) -> CacheOwner:
        """The owner that a model called ``name`` is."""
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(name, model.num_layers, model.num_kv_heads, model.head_dim, dtype)


def write_layers(path: str | os.PathLike[str], layers: Sequence[StoredLayer], owner: CacheOwner) -> None:
    """Write all layers under a temporary name in the same folder, then rename."""
    tensors: dict[str, Tensor] = {}
    described = []
    for index, layer in enumerate(layers):
        parts, facts = layer.state()
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in parts.items()}
        described.append({"layout": layer.layout, **facts})
    header = {"version": VERSION, "owner": asdict(owner), "layers": described}
    target = Path(path)
    try:
        with written_then_renamed(target) as partial:
            save_file(tensors, partial, metadata={"format": FORMAT, "facts": json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise CacheError(f"cannot write the cache to {target}: {reason(error)}; check the folder") from error


def read_layers(path: str | os.PathLike[str], owner: CacheOwner, device: str) -> list[StoredLayer]:
    """All layers of a saved cache, after checking that it belongs to ``owner``."""
    try:
        with safe_open(os.fspath(path), framework="pt", device=device) as file:
            header = _header(file.metadata(), path)
            _check_owner(header["owner"], owner, path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        layers = [_layer(index, facts, tensors) for index, facts in enumerate(header["layers"])]
        _check_shapes(layers, owner)
    except FileNotFoundError as error:
        raise CacheError(f"no cache at {path}; save one first") from error
    except CacheError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CacheError(
            f"{path} is damaged or no cache of TideKV ({reason(error)}); delete it and build the cache again"
        ) from error
    return layers


def _header(metadata: dict[str, str] | None, path: object) -> dict[str, Any]:
    if not metadata or metadata.get("format") != FORMAT:
        raise CacheError(f"{path} is a safetensors file, but no cache of TideKV; give one that save() wrote")
    header: dict[str, Any] = json.loads(metadata["facts"])
    if header["version"] != VERSION:
        raise CacheError(
            f"{path} has cache format {header['version']}, this version reads {VERSION}; build the cache again"
        )
    return header


def _check_owner(found: dict[str, Any], owner: CacheOwner, path: object) -> None:
    for name, wanted in asdict(owner).items():
        if found[name] != wanted:
            raise CacheError(
                f"{path} was saved for {name}={found[name]!r}, this model has {wanted!r}; build the cache again"
            )


def _layer(index: int, facts: dict[str, Any], tensors: dict[str, Tensor]) -> StoredLayer:
    prefix = f"{index}."
    mine = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return LAYOUTS[facts["layout"]].restore(mine, facts)


def _check_shapes(layers: Sequence[StoredLayer], owner: CacheOwner) -> None:
    """Every head's keys, values and positions must fit each other and the owner."""
    if len(layers) != owner.num_layers:
        raise ValueError(f"{len(layers)} layers instead of {owner.num_layers}")
    for index, layer in enumerate(layers):
        for head in range(owner.num_kv_heads):
            keys, positions = layer.keys_of(head), layer.positions_of(head)
            same_length = keys.shape[0] == layer.values_of(head).shape[0] == positions.shape[0]
            if not same_length or keys.shape[1] != owner.head_dim or str(keys.dtype) != f"torch.{owner.dtype}":
                raise ValueError(f"layer {index}, head {head} does not fit its description")
            ascending = bool((positions.diff() > 0).all())
            if len(positions) and (not ascending or int(positions[0]) < 0 or int(positions[-1]) >= layer.logical):
                raise ValueError(f"layer {index}, head {head} has impossible positions")
