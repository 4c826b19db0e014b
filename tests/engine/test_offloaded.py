"""Weights that accelerate keeps elsewhere: layers say where they compute, not where their weights lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import disk_offload
from transformers import PreTrainedModel

from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.errors import UnsupportedModelError
from tidekv_llm.hf import Decoder

CONFIG = PrefillConfig(chunk_size=32, kept_tokens=48, window_size=8)
PROMPT = random_prompt(120)
FOLLOW_UP = PROMPT[:100] + random_prompt(30, seed=1)


@pytest.fixture
def offloaded(tmp_path: Path) -> PreTrainedModel:
    model = tiny_model()
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert next(model.model.layers[0].parameters()).is_meta
    return model


def test_a_follow_up_on_offloaded_weights_equals_a_fresh_prefill(offloaded: PreTrainedModel) -> None:
    with TideKV(tiny_model(), prefill=CONFIG) as resident:
        fresh = resident.generate(FOLLOW_UP, max_new_tokens=6)
    with TideKV(offloaded, prefill=CONFIG) as llm, llm.with_prefix_cache(1 << 24) as reusing:
        reusing.generate(PROMPT, max_new_tokens=1)
        answer = reusing.generate(FOLLOW_UP, max_new_tokens=6)
    assert answer.metrics.reused_prefix_tokens > 0
    assert answer.token_ids == fresh.token_ids


def test_layers_and_embedding_say_where_they_compute(offloaded: PreTrainedModel) -> None:
    decoder = Decoder(offloaded)
    assert decoder.devices == (torch.device("cpu"),)
    assert decoder.device == torch.device("cpu")


def test_weights_that_are_nowhere_are_refused() -> None:
    with torch.device("meta"):
        model = tiny_model().to("meta")
    with pytest.raises(UnsupportedModelError, match="device_map"):
        TideKV(model)
