"""Brings a prefix's stored keys and values into the active layer, on CUDA one layer ahead of the computation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.active_layer import ActiveLayer
from tidekv_llm.prefill.prefix import PrefixReader


class Copier(Protocol):
    """Moves tensors into the active layer; see :class:`DirectCopy` and :class:`StreamCopy`."""

    def mark(self) -> Any:
        """What has been asked of the device so far."""

    def copy(self, target: Tensor, source: Tensor, after: Any) -> Any:
        """Begin a copy that overwrites nothing before ``after`` is through; returns what :meth:`wait` takes."""

    def wait(self, ticket: Any) -> None:
        """What is asked of the device from now on finds the copy done."""


class DirectCopy:
    """At once, in the order of the calls."""

    def mark(self) -> None:
        return None

    def copy(self, target: Tensor, source: Tensor, after: None) -> None:
        # Head by head: each is contiguous on both sides, so a device needs no buffer to spread them from.
        for head, stored in zip(target.flatten(0, 1), source.flatten(0, 1), strict=True):
            head.copy_(stored, non_blocking=True)

    def wait(self, ticket: None) -> None:
        return None


class StreamCopy:
    """On a stream of its own, so that the copy overlaps what the device computes.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            DirectCopy().copy(target, source, None)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        # A request that breaks off frees its buffers; nobody may have them before the copy is through.
        target.record_stream(self._stream)
        return event

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


class PrefixFeed:
    """Fills the first positions of every layer from a store.

    Args:
        reader: the store.
        count: positions to take from it.
        decoder: whose layers they are.
        active: where they go; with a copier that runs ahead it has two slots.
        copier: how; by default what the device can do.
    """

    def __init__(
        self, reader: PrefixReader, count: int, decoder: Decoder, active: ActiveLayer, copier: Copier | None = None
    ) -> None:
        self._reader, self._count, self._decoder, self._active = reader, count, decoder, active
        ahead = active.slots > 1
        self._copier: Copier = copier or (StreamCopy(decoder.device) if ahead else DirectCopy())
        self._begun: dict[int, list[Any]] = {}
        self._slot_free: Any = self._copier.mark()

    def fill(self, layer: int) -> None:
        """Have the prefix in place before the first chunk of ``layer``, the active layer."""
        if layer not in self._begun:
            self._slot_free = self._copier.mark()
            self._begin(layer)
        for ticket in self._begun.pop(layer):
            self._copier.wait(ticket)
        self._active.length = self._count
        # All layers before this one are asked for: their slot may be overwritten once they are through.
        self._slot_free = self._copier.mark()

    def ahead(self, layer: int) -> None:
        """Begin the copy of ``layer``, the next one, while the active layer computes."""
        if self._active.slots > 1 and layer < self._decoder.num_layers:
            self._begin(layer)

    def _begin(self, layer: int) -> None:
        keys, values = self._reader.load(layer)
        places = self._active.places(layer, keys, values, self._decoder.layer_device(layer))
        self._begun[layer] = [
            self._copier.copy(place[:, :, : self._count], stored[:, :, : self._count], self._slot_free)
            for place, stored in zip(places, (keys, values), strict=True)
        ]


def slots_for(decoder: Decoder) -> int:
    """Two where the next layer's copy can overlap this one's computation, else one.

    The second slot takes 2 * Hkv * D numbers per token. A follow-up lacks the document's part of the bridge, d_model
    numbers per token: only where the slot fits into that does its construction peak stay below the first question's.
    """
    one_device = len({decoder.layer_device(layer) for layer in range(decoder.num_layers)}) == 1
    fits = 2 * decoder.num_kv_heads * decoder.head_dim <= decoder.hidden_size
    return 2 if decoder.device.type == "cuda" and one_device and fits else 1
