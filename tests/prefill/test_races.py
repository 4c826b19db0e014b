"""Copies beside the computation touch nothing that a kernel still uses, on one device or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import random_prompt, tiny_model
from tests.tools.races import Races
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.attention import AttentionDispatch, Scratch
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill import hidden_bridge, layer_major, prefix_feed
from tidekv_llm.prefill.active_layer import ActiveLayer
from tidekv_llm.prefill.chunks import plan_chunks
from tidekv_llm.prefill.hidden_bridge import HostBridge
from tidekv_llm.prefill.prefix_feed import PrefixFeed

CONFIG = PrefillConfig(chunk_size=32, kept_tokens=32, window_size=4, score_block_size=64)
PROMPT = random_prompt(80)


@pytest.fixture
def races() -> Iterator[Races]:
    with Races() as checker:
        yield checker


def test_the_checker_finds_a_slot_that_a_queued_kernel_still_uses(races: Races) -> None:
    copier = races.copier("copy")
    stored = torch.zeros(1, 2, 64, 8)
    old = copier.mark()
    scores = torch.zeros(1, 2, 64, 8).add_(1)  # a kernel of layer 0, queued after the mark
    del scores  # freed: the allocator hands the block out again at once
    slot = torch.empty(1, 2, 64, 8)
    copier.copy(slot, stored, (old,))
    assert {(one.stream, other.stream) for one, other in races.found} == {("compute", "copy")}


def test_the_checker_finds_a_copy_that_nobody_waits_for(races: Races) -> None:
    copier = races.copier("copy")
    target, source = torch.zeros(1, 4, 8), torch.ones(1, 4, 8)
    ticket = copier.copy(target, source, (copier.mark(),))
    target.sum()
    assert len(races.found) == 1
    copier.wait(ticket)
    target.sum()
    assert len(races.found) == 1


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, races: Races) -> Races:
    """Follow-ups as on a CUDA device: two slots, a copy stream."""
    monkeypatch.setattr(layer_major, "slots_for", lambda decoder: 2)
    monkeypatch.setattr(prefix_feed, "make_copier", lambda device: races.copier("copy"))
    return races


def test_a_follow_up_never_overwrites_what_a_queued_kernel_uses(ahead: Races) -> None:
    # A tail whose MLP needs as much as a slot: the allocator would hand its block out again.
    follow_up = PROMPT + random_prompt(60, seed=1)
    with TideKV(tiny_model(num_hidden_layers=4), prefill=CONFIG.replace(chunk_size=64)) as llm:
        fresh = llm.generate(follow_up, max_new_tokens=2)
        with llm.with_prefix_cache(1 << 24) as reusing:
            reusing.generate(PROMPT, max_new_tokens=1)
            answer = reusing.generate(follow_up, max_new_tokens=2)
    assert answer.metrics.reused_prefix_tokens > 0
    assert answer.token_ids == fresh.token_ids
    assert ahead.found == []


def test_no_slot_appears_after_the_first_mark(races: Races) -> None:
    class Reader:
        def load(self, layer: int) -> tuple[Tensor, Tensor]:
            return torch.ones(1, 2, 9, 8), torch.ones(1, 2, 9, 8)

    decoder = Decoder(tiny_model(num_hidden_layers=4))
    active = ActiveLayer(12, 4, AttentionDispatch(), Scratch(), slots=2)
    feed = PrefixFeed(Reader(), 7, decoder, active, races.copier("copy"))
    before = active.nbytes
    for layer in range(decoder.num_layers):
        feed.fill(layer)
        feed.ahead(layer + 1)
        assert active.nbytes == before


def test_the_host_bridge_of_one_device_is_ordered(monkeypatch: pytest.MonkeyPatch, races: Races) -> None:
    made = _far_bridges(monkeypatch, races)
    with TideKV(tiny_model(num_hidden_layers=4), prefill=CONFIG.replace(bridge="host")) as far:
        logits = far.prefill(PROMPT).logits
    assert races.found == []
    assert made
    with TideKV(tiny_model(num_hidden_layers=4), prefill=CONFIG) as near:
        assert torch.equal(logits, near.prefill(PROMPT).logits)


@pytest.mark.parametrize("layers_on", ["aab", "aba", "bba", "abc"])
def test_the_host_bridge_of_several_devices_is_ordered(races: Races, layers_on: str) -> None:
    decoder = Decoder(tiny_model())
    chunks = plan_chunks(40, 16)
    bridge = HostBridge(1, chunks, decoder, lambda device: races.copier(f"copy {device}", f"compute {device}"))
    lanes = {name: torch.device("cpu", number) for number, name in enumerate("abc")}
    bridge._device = lanes["a"]
    with races.stream(f"compute {lanes['a']}"):
        for chunk in chunks:
            bridge.write(chunk, _on(torch.full((1, chunk.stop - chunk.start, 32), 1.0), lanes["a"]))
    for name in layers_on:
        with races.stream(f"compute {lanes[name]}"):
            for number, chunk in enumerate(chunks, start=1):
                hidden = bridge.read(chunk, lanes[name], chunks[number] if number < len(chunks) else None)
                bridge.write(chunk, _on(hidden * 2, lanes[name]))
    assert torch.equal(bridge.last(), torch.full((1, 1, 32), 8.0))
    assert races.found == []


def test_the_checker_finds_a_host_bridge_ordered_against_one_device_only(races: Races) -> None:
    bridge = HostBridge(1, plan_chunks(8, 8), Decoder(tiny_model()), lambda device: races.copier("copy", "compute a"))
    (chunk,) = plan_chunks(8, 8)
    with races.stream("compute b"):
        bridge.write(chunk, torch.ones(1, 8, 32) * 2)
    assert races.found


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor that says it lies on ``device``: there is one CPU only, and its tensors know no number."""

    class Placed(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return device

    return tensor.as_subclass(Placed)


def _far_bridges(monkeypatch: pytest.MonkeyPatch, races: Races) -> list[HostBridge]:
    """Bridges on the host as on a CUDA device; the list fills with those that were made."""
    made: list[HostBridge] = []

    def make(where: str, batch: int, chunks: Any, decoder: Decoder) -> HostBridge:
        made.append(HostBridge(batch, chunks, decoder, lambda device: races.copier("copy")))
        return made[-1]

    monkeypatch.setattr(layer_major, "make_bridge", make)
    assert hidden_bridge.make_bridge is not make
    return made
