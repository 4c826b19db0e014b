"""Dtypes as users name them."""

from __future__ import annotations

import torch

from tidekv_llm.errors import ConfigError

DTYPE_NAMES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "half": torch.float16, "fp32": torch.float32, "float32": torch.float32, "float": torch.float32,
}  # fmt: skip


def floating_dtype(option: str, value: str | torch.dtype) -> torch.dtype:
    """The dtype that an option names.

    Raises:
        ConfigError: it names none, or one that holds no fractions.
    """
    found = value if isinstance(value, torch.dtype) else DTYPE_NAMES.get(str(value).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"{option}={value!r} is unknown; use one of {', '.join(sorted(DTYPE_NAMES))}")
    if not found.is_floating_point:
        raise ConfigError(f"{option}={found} is not a floating-point type; use 'bfloat16' or 'float32'")
    return found
