"""Exact bytes of the tensors that are alive: the same number on every machine, for tests.

    with LiveBytes() as t:
        run()
    assert t.peak_bytes <= budget

It sees what torch operations *return* on the thread that entered it. Scratch that a kernel allocates and
frees inside itself is invisible, as is memory that is not torch's. It is far too slow for timing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# torch.tensor(...) allocates out of sight and shows up here as an *argument*.
_LIFTS = frozenset({"aten::lift_fresh", "aten::lift"})


class LiveBytes(TorchDispatchMode):
    """Counts each storage once, from the operation that returns it until it is freed.

    Views and in-place operations cost nothing. Storages that existed before are not counted, nor when an
    operation returns them again.

    Attributes:
        live_bytes: bytes alive now of the storages born inside the ``with`` block.
        peak_bytes: the highest ``live_bytes`` since the block began or since :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {} if func._schema.name in _LIFTS else dict(_storages((args, kwargs)))
        result = func(*args, **kwargs)
        for key, storage in given.items():
            self._resize(key, storage)  # an out= argument may have grown
        for key, storage in _storages(result):
            if key not in given:
                self._add(key, storage)
        return result

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        self.peak_bytes = self.live_bytes

    def _add(self, key: int, storage: torch.UntypedStorage) -> None:
        if key in self._sizes:
            self._resize(key, storage)
            return
        self._sizes[key] = 0
        # torch keeps one Python object per storage for as long as the storage lives.
        weakref.finalize(storage, self._free, key).atexit = False
        self._resize(key, storage)

    def _resize(self, key: int, storage: torch.UntypedStorage) -> None:
        if key not in self._sizes:
            return
        size = storage.nbytes()
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def _storages(tree: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta:
            storage = leaf.untyped_storage()
            yield storage._cdata, storage
