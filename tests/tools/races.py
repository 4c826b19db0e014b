"""Finds races between streams on a machine without a GPU.

    with Races() as races:
        run(copier=races.copier("copy"))
    assert races.found == []

Every torch operation counts as a kernel on the stream that is current: what it reads and writes are byte ranges of
simulated addresses. A stream's work is ordered; work of two streams is ordered by tickets alone. Two touches of the
same bytes from two streams, one of them a write, with no order between them, are a race.

Memory is handed out as CUDA's caching allocator does it: what is freed is at once free for the stream it was
allocated on, while kernels that still use it may be queued there. ``record_stream`` is never assumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tidekv_llm.prefill.copies import DirectCopy

Clock = dict[str, int]
# They run no kernel: the first only allocate, the others only look.
_ALLOCATE = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_LOOK = ("aten::detach", "aten::lift_fresh")


@dataclass(frozen=True)
class Touch:
    """An operation's use of the bytes [start, stop)."""

    operation: str
    stream: str
    time: int
    start: int
    stop: int
    writes: bool

    def races_with(self, other: Touch, seen: Clock) -> bool:
        """Whether ``other``, which knows of ``seen``, is unordered against this earlier touch."""
        meets = self.start < other.stop and other.start < self.stop
        return meets and (self.writes or other.writes) and self.time > seen.get(self.stream, 0)

    def covers(self, other: Touch) -> bool:
        """Whether this later touch of the same stream stands for ``other`` as well."""
        within = self.start <= other.start and other.stop <= self.stop
        return self.stream == other.stream and within and self.writes >= other.writes


class Races(TorchDispatchMode):
    """Attributes: ``found``, pairs of touches that nothing orders."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Touch, Touch]] = []
        self._clocks: dict[str, Clock] = {}
        self._waited: Clock = {}
        self._stream = "compute"
        self._addresses: dict[int, int] = {}
        self._free: dict[tuple[str, int], list[int]] = {}
        self._end = 0
        self._touches: dict[int, list[Touch]] = {}

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """What runs inside is asked of that stream."""
        before, self._stream = self._stream, name
        try:
            yield
        finally:
            self._stream = before

    def copier(self, name: str, compute: str = "compute") -> SimulatedCopier:
        """A copier with a copy stream ``name`` beside a compute stream."""
        return SimulatedCopier(self, name, compute)

    def clock(self, stream: str) -> Clock:
        """What a stream's next operation comes after."""
        return self._clocks.setdefault(stream, {**self._waited, stream: 0})

    def order(self, stream: str, after: Clock) -> None:
        """A stream's next operation comes after those in ``after``."""
        clock = self.clock(stream)
        for name, time in after.items():
            clock[name] = max(clock.get(name, 0), time)

    def wait_on_host(self, after: Clock) -> None:
        """The host itself waits, so whatever it asks of any stream from now on comes later."""
        self._waited |= {name: max(time, self._waited.get(name, 0)) for name, time in after.items()}
        for stream in self._clocks:
            self.order(stream, after)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        clock = self.clock(self._stream)
        clock[self._stream] += 1
        written = {id(tensor) for tensor in _mutated(func, args, kwargs)}
        kernel = not func.is_view and func._schema.name not in (*_ALLOCATE, *_LOOK)
        if kernel:
            for tensor in _tensors((args, kwargs)):
                self._touch(func, tensor, id(tensor) in written)
        known = set(self._addresses)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self._address(tensor.untyped_storage())
                if kernel:
                    self._touch(func, tensor, True)
        return result

    def _touch(self, func: Any, tensor: Tensor, writes: bool) -> None:
        block = self._address(tensor.untyped_storage())
        start = block + tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        clock = self.clock(self._stream)
        stop = start + (last + 1) * tensor.element_size()
        touch = Touch(func._schema.name, self._stream, clock[self._stream], start, stop, writes)
        earlier = self._touches.setdefault(block, [])
        self.found += [(one, touch) for one in earlier if one.races_with(touch, clock)]
        # What races with an earlier touch of a stream races with a later one that covers it.
        earlier[:] = [one for one in earlier if not touch.covers(one)]
        earlier.append(touch)

    def _address(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        if key not in self._addresses:
            # Sizes are rounded, so that a block serves again as it does on a device.
            size, owner = max(512, 1 << (storage.nbytes() - 1).bit_length()), self._stream
            blocks = self._free.setdefault((owner, size), [])
            if not blocks:
                blocks.append(self._end)
                self._end += size
            self._addresses[key] = blocks.pop()
            weakref.finalize(storage, self._release, key, owner, size).atexit = False
        return self._addresses[key]

    def _release(self, key: int, owner: str, size: int) -> None:
        self._free[owner, size].append(self._addresses.pop(key))


@dataclass(frozen=True)
class Moment:
    """A ticket: what was asked of all streams before it, as far as its own knows."""

    races: Races
    clock: Clock

    def synchronize(self) -> None:
        self.races.wait_on_host(self.clock)


class SimulatedCopier:
    """A :class:`tidekv_llm.prefill.copies.Copier`; the copy itself happens at once, its order is what counts."""

    def __init__(self, races: Races, name: str, compute: str) -> None:
        self._races, self._name, self._compute = races, name, compute

    def mark(self) -> Moment:
        return Moment(self._races, dict(self._races.clock(self._compute)))

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Moment]) -> Moment:
        for moment in after:
            self._races.order(self._name, moment.clock)
        with self._races.stream(self._name):
            DirectCopy().copy(target, source)
        return Moment(self._races, dict(self._races.clock(self._name)))

    def wait(self, ticket: Moment) -> None:
        self._races.order(self._compute, ticket.clock)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Arguments that the operation's schema says it writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)
