"""Brings a prefix's stored keys and values into the active layer, on CUDA one layer ahead of the computation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.active_layer import ActiveLayer
from tidekv_llm.prefill.copies import Copier, DirectCopy, make_copier
from tidekv_llm.prefill.prefix import PrefixReader


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
        self._copier = copier or (make_copier(decoder.device) if active.slots > 1 else DirectCopy())
        self._begun: dict[int, list[Any]] = {}
        self._loaded: dict[int, tuple[Tensor, Tensor]] = {0: reader.load(0)}
        # Every slot exists before the first mark: one that was allocated while layer 0 is queued could be a block
        # that its kernels still use, and the copy would wait for none of them.
        for layer in range(decoder.num_layers):
            active.places(layer, *self._loaded[0], decoder.layer_device(layer))
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
        keys, values = self._loaded.pop(layer) if layer in self._loaded else self._reader.load(layer)
        places = self._active.places(layer, keys, values, self._decoder.layer_device(layer))
        self._begun[layer] = [
            self._copier.copy(place[:, :, : self._count], stored[:, :, : self._count], (self._slot_free,))
            for place, stored in zip(places, (keys, values), strict=True)
        ]


def slots_for(decoder: Decoder) -> int:
    """Two where the next layer's copy can overlap this one's computation, else one.

    The second slot takes 2 * Hkv * D numbers per token. A follow-up lacks the document's part of the bridge, d_model
    numbers per token: only where the slot fits into that does its construction peak stay below the first question's.
    """
    fits = 2 * decoder.num_kv_heads * decoder.head_dim <= decoder.hidden_size
    return 2 if decoder.device.type == "cuda" and len(decoder.devices) == 1 and fits else 1
