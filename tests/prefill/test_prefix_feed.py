"""The prefix of a layer arrives before its chunks, and with two slots while the layer before it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_model
from tidekv_llm.attention import AttentionDispatch, Scratch
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.active_layer import ActiveLayer
from tidekv_llm.prefill.prefix_feed import PrefixFeed, slots_for

LENGTH, COUNT = 12, 7


class Reader:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        self.log.append(("load", layer))
        return torch.full((1, 2, 9, 4), float(layer)), torch.full((1, 2, 9, 4), float(layer) + 0.5)


class LateCopier:
    """Copies only when somebody waits, as a stream might."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log, self.marks = log, 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def copy(self, target: Tensor, source: Tensor, after: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        self.log.append(("copy", int(source.flatten()[0]), *after))
        return target, source

    def wait(self, ticket: tuple[Tensor, Tensor]) -> None:
        ticket[0].copy_(ticket[1])


@pytest.mark.parametrize("slots", [1, 2])
def test_every_layer_finds_its_own_prefix(slots: int) -> None:
    log: list[tuple[Any, ...]] = []
    decoder = Decoder(tiny_model())
    active = ActiveLayer(LENGTH, 4, AttentionDispatch(), Scratch(), slots=slots)
    feed = PrefixFeed(Reader(log), COUNT, decoder, active, LateCopier(log))
    for layer in range(decoder.num_layers):
        active.begin(layer)
        feed.fill(layer)
        assert active.length == COUNT
        new = torch.full((1, 2, 5, 4), -1.0)
        keys, values = active.update(new, new)
        assert keys.unique().tolist() == [-1.0, layer]
        assert values.unique().tolist() == [-1.0, layer + 0.5]
        assert torch.equal(keys[:, :, :COUNT], torch.full((1, 2, COUNT, 4), float(layer)))
        feed.ahead(layer + 1)
        assert torch.equal(keys[:, :, :COUNT], torch.full((1, 2, COUNT, 4), float(layer)))
    assert [entry for entry in log if entry[0] == "load"] == [("load", layer) for layer in range(3)]
    # What a copy waits for: with one slot all that was asked for, with two only the layers before the active one.
    marks = [entry[2] for entry in log if entry[0] == "copy"][::2]
    assert marks == ([2, 4, 6] if slots == 1 else [2, 3, 4])
    assert active.nbytes == slots * 2 * 2 * LENGTH * 4 * 4


def test_a_second_slot_is_for_cuda_only() -> None:
    assert slots_for(Decoder(tiny_model())) == 1
