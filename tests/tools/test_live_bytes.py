"""The tracker against allocation patterns whose bytes are known."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.tools.live_bytes import LiveBytes

KIB = 1024  # float32 vectors of 256 elements


def vector(kib: int = 1) -> torch.Tensor:
    return torch.zeros(kib * 256)


def test_counts_what_is_alive_and_remembers_the_peak():
    with LiveBytes() as t:
        first = vector(4)
        second = vector(2)
        assert t.live_bytes == 6 * KIB
        del first
        assert t.live_bytes == 2 * KIB
        third = vector(1)
    assert (t.live_bytes, t.peak_bytes) == (3 * KIB, 6 * KIB)
    del second, third
    assert (t.live_bytes, t.peak_bytes) == (0, 6 * KIB)


def test_a_temporary_counts_until_it_is_replaced():
    with LiveBytes() as t:
        x = vector()
        x = x + 1  # both live for a moment
    assert (t.live_bytes, t.peak_bytes) == (KIB, 2 * KIB)
    assert x.numel() == 256


def test_views_cost_nothing():
    with LiveBytes() as t:
        x = vector(4)
        views = [x.view(4, 256), x[:10], x.view(4, 256).t(), x.expand(3, -1), x.detach()]
        assert t.peak_bytes == 4 * KIB
        del x
        assert t.live_bytes == 4 * KIB, "a view keeps its storage alive"
        del views
    assert t.live_bytes == 0


def test_in_place_operations_cost_nothing():
    with LiveBytes() as t:
        x = vector()
        x.add_(1).mul_(2)
        x[:8].fill_(3)
    assert t.peak_bytes == KIB


def test_out_argument_costs_nothing_unless_it_grows():
    with LiveBytes() as t:
        left, right, out = vector(), vector(), vector()
        torch.add(left, right, out=out)
        assert t.peak_bytes == 3 * KIB
        grown = torch.empty(0)
        torch.add(left, right, out=grown)
    assert (t.live_bytes, t.peak_bytes) == (4 * KIB, 4 * KIB)


def test_storages_from_before_are_not_counted():
    old = vector(8)
    with LiveBytes() as t:
        views = [old[1:], old.view(8, 256), old.add_(1), old.detach(), torch.mul(old, 2, out=old)]
        assert t.peak_bytes == 0
        copy = old.clone()
        assert t.live_bytes == 8 * KIB
        del old, views, copy
    assert (t.live_bytes, t.peak_bytes) == (0, 8 * KIB)


def test_address_reuse_is_not_confused():
    with LiveBytes() as t:
        for _ in range(50):
            x = vector(64)
            del x
    assert (t.live_bytes, t.peak_bytes) == (0, 64 * KIB)


def test_tensors_made_from_python_data_count():
    with LiveBytes() as t:
        x = torch.tensor([1.0] * 256)
    assert t.live_bytes == KIB
    del x
    assert t.live_bytes == 0


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_works_without_autograd(guard):
    with guard(), LiveBytes() as t:
        x = vector()
        y = x.view(2, 128) @ x.view(128, 2)
    assert (t.live_bytes, t.peak_bytes) == (KIB + 16, KIB + 16)
    del x, y
    assert t.live_bytes == 0


def test_results_of_several_tensors_count_each():
    with LiveBytes() as t:
        values, indices = torch.topk(vector(), 16)
        assert t.live_bytes == 16 * 4 + 16 * 8
    assert t.peak_bytes == KIB + 16 * 4 + 16 * 8
    assert values.shape == indices.shape


def test_split_shares_one_storage():
    with LiveBytes() as t:
        parts = vector(4).split(256)
        assert t.live_bytes == 4 * KIB
        parts = parts[:1]
        assert t.live_bytes == 4 * KIB, "one part keeps all of it"
    assert len(parts) == 1


def test_reset_peak_starts_from_what_is_alive():
    with LiveBytes() as t:
        x = vector(2)
        vector(8)
        t.reset_peak()
        assert t.peak_bytes == 2 * KIB
        vector(1)
    assert t.peak_bytes == 3 * KIB
    assert x.numel() == 512


def test_a_cycle_is_freed_by_the_collector():
    with LiveBytes() as t:
        holder: list[object] = [vector()]
        holder.append(holder)
        del holder
        gc.collect()
    assert t.live_bytes == 0


def test_linear_layer_peak_is_its_output():
    layer = torch.nn.Linear(64, 128, bias=False)
    x = torch.zeros(32, 64)
    with torch.no_grad(), LiveBytes() as t:
        y = layer(x)
    assert t.peak_bytes == y.nbytes == 32 * 128 * 4


def test_is_exact_after_an_error():
    with pytest.raises(RuntimeError, match="size"), LiveBytes() as t:
        vector(2) + vector(3)
    gc.collect()
    assert t.live_bytes == 0
