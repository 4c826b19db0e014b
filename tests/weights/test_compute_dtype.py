"""Weights stored in one dtype and computed in another, one layer ready at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import FAMILIES, random_prompt, tiny_model
from tests.tools.live_bytes import LiveBytes
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.errors import Cancelled, ConfigError
from tidekv_llm.hardware import fastest_compute, stored_as
from tidekv_llm.request import Progress
from tidekv_llm.schedules import schedule_names

PROMPT = random_prompt(50)
EVERYTHING = PrefillConfig(kept_tokens=64, chunk_size=16)


def bfloat16(family: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_model(family, **changes).to(torch.bfloat16)


def contents(model: PreTrainedModel) -> dict[str, tuple[int, torch.dtype, torch.Tensor]]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: (tensor.data_ptr(), tensor.dtype, tensor.detach().clone()) for name, tensor in named}


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, (address, dtype, numbers) in before.items():
        assert after[name][:2] == (address, dtype), name
        assert torch.equal(after[name][2], numbers), name


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_computed_in_float32_are_nearer_to_float32_than_bfloat16_ones(family: str) -> None:
    """The reference is the same bfloat16 weights in a model that is float32 throughout."""
    stored = bfloat16(family)
    exact = tiny_model(family)
    exact.load_state_dict(stored.state_dict())
    with torch.no_grad():
        expected = exact(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    wide = TideKV(stored, prefill=EVERYTHING, compute_dtype="float32").prefill(PROMPT).logits
    assert relative(wide, expected) < 0.05
    hidden = TideKV(stored, prefill=EVERYTHING, compute_dtype="float32").prefill(PROMPT).hidden
    assert hidden.dtype == torch.bfloat16


@pytest.mark.parametrize("schedule", schedule_names())
def test_what_is_stored_is_in_the_storage_dtype_and_the_model_as_before(schedule: str) -> None:
    model = bfloat16()
    before = contents(model)
    llm = TideKV(model, prefill=EVERYTHING.replace(schedule=schedule), compute_dtype=torch.float32)
    prefilled = llm.prefill(PROMPT, reserve=8)
    stored = [getattr(layer, "keys", None) for layer in prefilled.cache.layers]
    assert {keys.dtype for keys in stored if isinstance(keys, torch.Tensor)} <= {torch.bfloat16}
    assert len(llm.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids) == 4
    assert_same(before, contents(model))


def test_the_model_is_as_before_when_a_prompt_breaks_off() -> None:
    model = bfloat16()
    before = contents(model)
    llm = TideKV(model, prefill=EVERYTHING, compute_dtype="float32")

    def stop(progress: Progress) -> None:
        if progress.layer == 2:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        llm.generate(PROMPT, max_new_tokens=4, progress=stop)
    assert_same(before, contents(model))
    assert llm.generate(PROMPT, max_new_tokens=1, ignore_eos=True).token_ids


def test_float32_weights_computed_in_bfloat16_is_possible_too() -> None:
    model = tiny_model()
    expected = TideKV(model, prefill=EVERYTHING).prefill(PROMPT)
    found = TideKV(model, prefill=EVERYTHING, compute_dtype="bfloat16").prefill(PROMPT)
    assert found.hidden.dtype == torch.float32
    assert 1e-4 < relative(found.logits, expected.logits) < 0.1


def test_no_buffer_where_nothing_is_to_be_made() -> None:
    llm = TideKV(tiny_model(), prefill=EVERYTHING)
    assert llm.shape.ready_bytes == 0
    assert llm.generate(PROMPT, max_new_tokens=1, ignore_eos=True).metrics.components["ready_layer"] == 0


def test_one_layer_is_ready_at_a_time_and_the_meter_knows_its_bytes() -> None:
    model = bfloat16(hidden_size=128, intermediate_size=512, num_hidden_layers=6)
    llm = TideKV(model, prefill=EVERYTHING.replace(attention="merge"), compute_dtype="float32")
    layer = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert llm.shape.ready_bytes == pytest.approx(layer, rel=0.01)
    with LiveBytes() as tracker:
        metrics = llm.generate(PROMPT, max_new_tokens=1, ignore_eos=True).metrics
    assert metrics.components["ready_layer"] == llm.shape.ready_bytes
    assert layer < tracker.peak_bytes < 2 * layer
    assert tracker.live_bytes < layer / 10


@pytest.mark.parametrize("value", ["int8", "floaty", torch.int8, 7])
def test_a_compute_dtype_that_is_none_is_one_line(value: Any) -> None:
    with pytest.raises(ConfigError, match="compute_dtype=") as caught:
        TideKV(tiny_model(), compute_dtype=value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "computed"), [("baseline", torch.float32), ("avx512", torch.float32), ("avx512_bf16", torch.bfloat16)]
)
def test_a_cpu_computes_in_what_it_multiplies_natively(
    kind: str, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidekv_llm.hardware.cpu_kind", lambda: kind)
    cpu = torch.device("cpu")
    assert fastest_compute(torch.bfloat16, cpu) == computed
    assert fastest_compute(torch.float32, cpu) == torch.float32
    assert stored_as(torch.float16, cpu) == stored_as(torch.bfloat16, cpu) == torch.bfloat16
    assert stored_as(torch.float32, cpu) == stored_as(None, cpu) == computed
