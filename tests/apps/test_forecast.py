"""What an answer would take in memory, against what the model's own devices have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.apps.support import MODEL
from tidekv_apps.forecast import memory_problem, predictions
from tidekv_apps.settings import AskSettings
from tidekv_llm import planner
from tidekv_llm.models.shapes import shape_of_config
from tidekv_llm.service import ModelFacts
from tidekv_llm.shapes import ModelShape

SETTINGS = AskSettings(model=MODEL, chunk_size=512)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device with nothing free but 64 GiB that torch has reserved and does not use; notes which one was asked."""
    devices: list[Any] = []
    monkeypatch.setattr(planner, "available_bytes", lambda device: devices.append(device) or 0)
    monkeypatch.setattr(planner, "reusable_bytes", lambda device: 64 << 30)
    return devices


def facts(shape: ModelShape, *devices: str) -> ModelFacts:
    return ModelFacts(MODEL, None, shape, 8192, tuple(torch.device(one) for one in devices))


def test_memory_that_the_allocator_holds_but_does_not_use_counts_as_free(asked: list[Any], shape: ModelShape) -> None:
    assert memory_problem(facts(shape, "cuda:1"), 4096, SETTINGS) == ""


def test_the_devices_that_hold_the_model_are_asked(asked: list[Any], shape: ModelShape) -> None:
    memory_problem(facts(shape, "cuda:1", "cuda:2"), 4096, SETTINGS)
    assert set(asked) == {(torch.device("cuda:1"), torch.device("cuda:2"))}


def test_too_little_is_refused_with_the_planners_numbers_and_no_command(
    asked: list[Any], shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "reusable_bytes", lambda device: 1 << 20)
    problem = memory_problem(facts(shape, "cpu"), 4096, SETTINGS)
    assert "tidekv needs" in problem and "1.00 MiB are free" in problem
    assert "tidekv plan" not in problem and "--" not in problem


def test_every_answer_is_compared_with_the_same_three(shape: ModelShape) -> None:
    assert set(predictions(facts(shape, "cpu"), 4096, SETTINGS)) == {"tidekv", "post-prefill", "one-shot"}


@pytest.fixture
def shape() -> ModelShape:
    from transformers import LlamaConfig

    return shape_of_config(LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9))
