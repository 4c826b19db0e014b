"""A GGUF file whose weights stay as they are in it: mapped, and made dense a layer at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tidekv_llm.errors import ModelError, one_line
from tidekv_llm.weights.blocks import BLOCK_TYPES, Blocks, MappedFile
from tidekv_llm.weights.forms import Form

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Families whose tensors are stored in the file as the model has them, and those whose rotary pairs lie interleaved.
_AS_THEY_ARE = ("qwen2", "qwen3", "phi3")
_INTERLEAVED = ("llama", "mistral")
_PLAIN = ("F32", "F16", "BF16")


class GgufFile:
    """The tensors of a GGUF file by the model's names.

    Args:
        path: of the file.
        model: whose names and shapes they take.

    Raises:
        ModelError: the file is truncated or damaged.
    """

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path, "c")  # private pages: torch takes no read-only ones
            tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # it believes every number that the file says
            said = one_line(f"{type(error).__name__}: {error}", 120)
            raise ModelError(f"{path} is truncated or damaged ({said}); fetch it again") from error
        pages: Any = reader.data
        self._file, self._config = MappedFile(path, pages._mmap), model.config
        self._tensors = {name: tensors[key] for name, key in _names(model).items() if key in tensors}
        self.names: Collection[str] = self._tensors.keys()

    @property
    def uncovered(self) -> str:
        """Why the blocks cannot stay as they are; empty if they can."""
        family = str(self._config.model_type)
        if family not in (*_AS_THEY_ARE, *_INTERLEAVED):
            return f"of the family {family}"
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values()} - {*BLOCK_TYPES, *_PLAIN}
        return f"with {', '.join(sorted(kinds))} blocks" if kinds else ""

    def read(self, name: str) -> Tensor | Form:
        """The blocks of a matrix, mapped; the numbers of what has none."""
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if kind not in BLOCK_TYPES:
            return self._in_order(name, _numbers(tensor, kind))
        stored = torch.from_numpy(tensor.data)
        rows = self._in_order(name, stored)
        return Blocks(rows, kind, self._file if rows is stored else None)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows of queries and keys as the model has them: ggml pairs (0, 1), (2, 3)... where it has halves."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or self._config.model_type not in _INTERLEAVED:
            return rows
        pairs = rows.view(getattr(self._config, heads), -1, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _numbers(tensor: Any, kind: str) -> Tensor:
    from gguf.quants import dequantize

    shape = tuple(int(size) for size in reversed(tensor.shape))
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)).view(shape)


def _names(model: PreTrainedModel) -> dict[str, str]:
    """The model's names of parameters to the file's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    family = str(model.config.model_type)
    arch = next((key for key, value in MODEL_ARCH_NAMES.items() if value == family), None)
    if arch is None:
        arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == "llama")
    known, found = get_tensor_name_map(arch, model.config.num_hidden_layers), {}
    for name, _ in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        if (key := known.get_name(stem)) is not None:
            found[name] = f"{key}.{kind}"
    return found
