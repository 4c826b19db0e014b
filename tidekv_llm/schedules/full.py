"""Layer ends that keep every position: what the controls without eviction store, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.schedules.base import Job

MakeLayer = Callable[[int, int | None], GrowingLayer]


class KeepEverything(Compressor):
    """Copies a finished layer's full keys and values into storage of its own."""

    make_layer: MakeLayer

    def accumulator(self) -> None:
        """Nobody scores."""

    def compress(self, layer: FullLayer, window: int | None) -> StoredLayer:
        stored = self.make_layer(layer.prompt_length + self.reserve, window)
        stored.update(layer.keys, layer.values)
        stored.seal()
        return stored


def keep_everything(job: Job, make_layer: MakeLayer) -> Job:
    """``job`` with a layer end that keeps all positions in what ``make_layer(capacity, window)`` gives."""
    own = job.compressor
    keeper = KeepEverything(own.config, own.num_layers, own.prompt_length, own.reserve, own.full_layers)
    keeper.make_layer = make_layer
    return replace(job, compressor=keeper)


def growing(capacity: int, window: int | None) -> GrowingLayer:
    """Plain storage on the device."""
    return GrowingLayer(capacity, window=window)


def capacity(token_ids: Tensor, job: Job) -> int:
    """Slots for the prompt [B, S] and the tokens to decode."""
    return token_ids.shape[1] + job.compressor.reserve
