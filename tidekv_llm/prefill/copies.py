"""Copies that overlap the computation: the one interface through which a prefill touches streams and events.

Everything a prefill asks of a second stream goes through :class:`Copier`, so that a machine without a GPU can put a
checker in its place that knows which bytes each stream touches and in what order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Ticket(Protocol):
    """Stands for work that was asked for."""

    def synchronize(self) -> None:
        """Return when it is done: for a host that reads what was written."""


class Copier(Protocol):
    """Moves tensors beside what a device computes."""

    def mark(self) -> Ticket:
        """A ticket for all that the device was asked to compute so far."""

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        """Begin to copy ``source`` over ``target`` once the tickets ``after`` are through; returns a ticket.

        Both must exist since before the oldest of ``after``: a block that was allocated later may be one that the
        device's queued work still uses.
        """

    def wait(self, ticket: Ticket) -> None:
        """What the device is asked to compute from now on finds the copy done."""


class Done:
    """A ticket for what was done when it was asked for."""

    def synchronize(self) -> None:
        return None


class DirectCopy:
    """At once, in the order of the calls."""

    def mark(self) -> Ticket:
        return Done()

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.synchronize()
        # Head by head (of hidden states, row by row of the batch): each is contiguous on both sides, so a device
        # needs no buffer to spread them from.
        for piece, stored in zip(target.flatten(0, -3), source.flatten(0, -3), strict=True):
            piece.copy_(stored, non_blocking=True)
        return Done()

    def wait(self, ticket: Ticket) -> None:
        ticket.synchronize()


class StreamCopy:
    """On a stream of its own, so that the copy overlaps what the device computes.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Ticket:
        return _recorded(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor, after: Sequence[Ticket]) -> Ticket:
        for ticket in after:
            _order(self._stream, ticket)
        with torch.cuda.stream(self._stream):
            DirectCopy().copy(target, source)
        # A request that breaks off frees its buffers; nobody may have them before the copy is through.
        (target if target.is_cuda else source).record_stream(self._stream)
        return _recorded(self._stream)

    def wait(self, ticket: Ticket) -> None:
        _order(torch.cuda.current_stream(self._device), ticket)


def make_copier(device: torch.device) -> Copier:
    """What copies to and from ``device`` beside its computation, as far as it can."""
    return StreamCopy(device) if device.type == "cuda" else DirectCopy()


def _order(stream: Any, ticket: Ticket) -> None:
    """What ``stream`` is asked from now on comes after the ticket; the host waits only for what is no event."""
    if isinstance(ticket, torch.cuda.Event):
        stream.wait_event(ticket)
    else:
        ticket.synchronize()


def _recorded(stream: Any) -> Ticket:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
