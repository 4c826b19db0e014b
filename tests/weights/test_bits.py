"""Weights in 8 and 4 bits: what they are nearest to, what is computed from them, and how they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.support import save_tiny_llama
from tests.tiny_models import FAMILIES, random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.errors import ConfigError
from tidekv_llm.models import load
from tidekv_llm.models.shapes import shape_of_config
from tidekv_llm.weights.forms import Form, Int4, Int8, has_packed_kernels, quantised
from tidekv_llm.weights.quantise import quantise_model
from tidekv_llm.weights.stored import StoredLinear, lacks_numbers

PROMPT = random_prompt(50)
EVERYTHING = PrefillConfig(kept_tokens=64, chunk_size=16)


def weight(rows: int = 128, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def forms() -> list[Form]:
    return [Int8.of(weight()), Int4.of(weight())]


def quantised_model(family: str, bits: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    changes: dict[str, Any] = {"head_dim": 16} if "head_dim" in FAMILIES[family] else {}
    model = tiny_model(family, hidden_size=64, intermediate_size=128, **changes).to(dtype)
    quantise_model(model, bits)
    return model


@pytest.mark.parametrize(("form", "steps"), [(Int8, 127), (Int4, 7.5)])
def test_no_number_is_further_than_half_a_step_of_its_row_or_group(form: Any, steps: float) -> None:
    dense = weight()
    made = form.of(dense).dense(torch.float32)
    groups = dense if form is Int8 else dense.view(128, -1, 32)
    span = groups.abs().amax(-1) if form is Int8 else (groups.amax(-1) - groups.amin(-1)) / 2
    limit = span / steps / 2 * 1.02 + groups.abs().amax(-1) / 256 * (form is Int4)  # its zero is a bfloat16
    assert bool(((made - dense).view(groups.shape).abs() <= limit[..., None]).all())


@pytest.mark.parametrize("form", forms(), ids=lambda form: type(form).__name__)
def test_rows_products_and_the_dense_weight_are_the_same_numbers(form: Form) -> None:
    dense = form.dense(torch.float32)
    index = torch.tensor([0, 31, 32, 63, 64, 127, 5])
    torch.testing.assert_close(form.rows(index), dense[index], rtol=1e-6, atol=1e-6)
    for rows in (1, 3, 40):
        hidden = torch.randn(rows, 96)
        torch.testing.assert_close(form.multiply(hidden), hidden @ dense.t(), rtol=1e-4, atol=1e-4)
        found = form.multiply(hidden.bfloat16()).float()
        expected = hidden.bfloat16().float() @ dense.t()
        assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.skipif(not has_packed_kernels(), reason="torch multiplies packed codes by plain loops here")
def test_few_rows_in_bfloat16_read_the_packed_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int4, "make", None)
    monkeypatch.setattr(Int8, "make", None)
    for form in forms():
        assert form.multiply(torch.randn(1, 96).bfloat16()).shape == (1, 128)


def test_what_fills_no_tile_of_4_bits_takes_8() -> None:
    assert type(quantised(weight(128, 96), 4)) is Int4
    assert type(quantised(weight(127, 96), 4)) is Int8
    assert type(quantised(weight(128, 90), 4)) is Int8


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_self_check_and_answers_as_its_own_forward(family: str, bits: int) -> None:
    model = quantised_model(family, bits)
    llm = TideKV(model, prefill=EVERYTHING)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(llm.prefill(PROMPT).logits, expected, rtol=1e-3, atol=1e-3)
    assert len(llm.generate(PROMPT, max_new_tokens=3, ignore_eos=True).token_ids) == 3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_forms_in_bfloat16_models_are_computed_in_float32(family: str, bits: int) -> None:
    """Nearer to the same codes in a float32 model than the bfloat16 model's own forward is."""
    stored, exact = quantised_model(family, bits, torch.bfloat16), quantised_model(family, bits)
    real = {name: tensor for name, tensor in stored.state_dict().items() if not tensor.isnan().all()}
    exact.load_state_dict(real, strict=False)
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        expected, own = (model(prompt, use_cache=False).logits[0, -1].float() for model in (exact, stored))
    llm = TideKV(stored, prefill=EVERYTHING, compute_dtype="float32")
    assert (llm.prefill(PROMPT).logits - expected).norm() < (own - expected).norm()
    assert llm.shape.ready_bytes > 0


def test_outside_its_turn_a_layer_has_no_dense_weights() -> None:
    model = quantised_model("llama", 4)
    TideKV(model, prefill=EVERYTHING).generate(PROMPT, max_new_tokens=2)
    linears = [module for module in model.modules() if isinstance(module, StoredLinear)]
    assert len(linears) == 3 * 7 + 1
    assert all(lacks_numbers(linear.weight) and linear.weight.isnan().all() for linear in linears)


# --- loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_while_reading_is_quantised_afterwards(tmp_path: Path, bits: int) -> None:
    folder = save_tiny_llama(tmp_path)
    read = load(folder, weight_bits=bits, device="cpu", dtype="float32").model
    after = load(folder, device="cpu", dtype="float32").model
    quantise_model(after, bits)
    found, expected = read.state_dict(), after.state_dict()
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]) or found[name].isnan().all(), name
    assert not any(parameter.requires_grad for parameter in read.parameters())


def test_quantised_weights_are_counted_as_they_lie(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path)
    wide = TideKV.from_pretrained(folder, device="cpu", dtype="float32")
    small = TideKV.from_pretrained(folder, device="cpu", dtype="float32", weight_bits=8)
    assert small.shape.weight_bytes < 0.45 * wide.shape.weight_bytes
    assert small.cache_owner != wide.cache_owner


@pytest.mark.parametrize("bits", [0, 2, 5, 32, True, "8", None, 8.5])
def test_other_numbers_of_bits_are_one_line(tmp_path: Path, bits: Any) -> None:
    with pytest.raises(ConfigError, match=r"weight_bits=.* must be 16") as caught:
        load(save_tiny_llama(tmp_path), weight_bits=bits)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"device_map": "cpu"}, {"quantization_config": {"quant_method": "x"}}, {"device": "cuda:0"}]
)
def test_options_that_exclude_bits_are_one_line(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="weight_bits=8") as caught:
        load(save_tiny_llama(tmp_path), weight_bits=8, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_plan_foresees_the_bytes_of_quantised_weights(family: str, bits: int) -> None:
    model = quantised_model(family, bits, torch.bfloat16)
    found = TideKV(model, prefill=EVERYTHING, compute_dtype="float32").shape
    planned = shape_of_config(model.config, compute_dtype="float32", weight_bits=bits)
    assert planned.weight_bytes == pytest.approx(found.weight_bytes, rel=0.01)
    assert planned.ready_bytes == pytest.approx(found.ready_bytes, rel=0.01)
    assert planned.activation_bytes == found.activation_bytes == 4
