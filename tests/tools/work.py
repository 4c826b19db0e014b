"""Work of torch code, counted instead of timed: the same number on every machine, busy or not."""

from __future__ import annotations

import re
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that are given a tensor for its dtype and device only: aten::new_zeros, aten::empty_like.
_FACTORY = re.compile(r"::new_|_like$")
# Operators that hand out the same memory without saying that they are views.
_ALIASES = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}


class Work(TorchDispatchMode):
    """While it is entered, counts what every operator reads and writes.

    A view (``slice``, ``transpose``...) moves nothing; an expanded tensor counts with the memory it really has.

    Attributes:
        moved_bytes: of all tensors read and written.
        launches: operators that read or write any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0
        self.launches = 0

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func._schema.name in _ALIASES):
            read = [] if _FACTORY.search(func._schema.name) else _tensors((args, kwargs))
            self.launches += 1
            self.moved_bytes += sum(_bytes(tensor) for tensor in (*read, *_tensors(result)))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0]
    return torch.Size(sizes).numel() * tensor.element_size()
