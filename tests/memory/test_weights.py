"""Bytes of a model's weights."""

from __future__ import annotations

import torch

from tidekv_llm.memory import weight_bytes


def test_tied_weights_count_once():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    assert weight_bytes(model) == 2 * 160
    model[1].weight = model[0].weight
    assert weight_bytes(model) == 160


def test_views_of_one_storage_count_once_and_buffers_count():
    storage = torch.zeros(100)
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(storage[:40])
    model.b = torch.nn.Parameter(storage[40:])
    model.register_buffer("c", torch.zeros(8, dtype=torch.int64))
    assert weight_bytes(model) == 400 + 64


def test_meta_weights_are_told_apart():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    assert weight_bytes(model) == 128


def test_a_model_without_weights_has_none():
    assert weight_bytes(torch.nn.Identity()) == 0
