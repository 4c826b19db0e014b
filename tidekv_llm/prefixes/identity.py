"""What the numbers in a store come from: configuration, weights and the libraries that computed with them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
import transformers
from torch import Tensor

from tidekv_llm.hardware import processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Numbers looked at per parameter. All of them would be a read of the whole model: seconds for a large one.
_SAMPLE = 4096


def model_identity(model: PreTrainedModel, compute_dtype: torch.dtype) -> str:
    """A digest that changes with the configuration, any weight matrix, dtypes, device kind and library release.

    Two fine-tunes of one model share name, shapes and often the embedding: so every parameter is sampled.
    """
    config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    # The rounding is theirs: the same weights on another release or processor give other last bits.
    libraries = f"{torch.__version__} {transformers.__version__} {processor(model.device)} {compute_dtype}"
    digest.update(libraries.encode())
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(_sample(parameter))
    return digest.hexdigest()


def _sample(parameter: Tensor) -> bytes:
    """Evenly spread numbers of a parameter, as bytes; nothing for one that has no memory of its own."""
    if parameter.is_meta or parameter.numel() == 0:
        return b""
    flat = parameter.detach().reshape(-1)
    # An odd step: an even one would look at the same few columns of a matrix again and again.
    chosen = flat[:: flat.numel() // _SAMPLE | 1]
    return chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()
