"""GGUF files whose weights stay as their blocks: exact against gguf's own, mapped, and refused when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.errors import ModelError
from tidekv_llm.models.direct import can_read, empty_model, fill
from tidekv_llm.models.gguf_file import GgufFile
from tidekv_llm.weights.blocks import BLOCK_TYPES, Blocks
from tidekv_llm.weights.forms import Int4, Int8, has_packed_kernels
from tidekv_llm.weights.stored import StoredEmbedding, StoredLinear

PROMPT = random_prompt(50)
EVERYTHING = PrefillConfig(kept_tokens=64, chunk_size=16)
# Bytes of a block at which a float16 begins.
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
# What gguf can write itself.
WRITABLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def random_blocks(kind: str, rows: int = 64, columns: int = 512) -> np.ndarray[Any, Any]:
    """Every code, scale and sign occurs: bytes at random, with float16 numbers where the block has them."""
    generator, block = np.random.default_rng(0), BLOCK_TYPES[kind]
    blocks = generator.integers(0, 256, (rows * columns // block.numbers, block.nbytes), dtype=np.uint8)
    for at in HALVES.get(kind, [208]):
        blocks[:, at : at + 2] = generator.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_are_ggufs_own_numbers_bit_for_bit(kind: str) -> None:
    raw = random_blocks(kind)
    expected = torch.from_numpy(dequantize(raw, gguf.GGMLQuantizationType[kind]))
    form = Blocks(torch.from_numpy(raw), kind)
    assert form.shape == expected.shape
    assert torch.equal(form.dense(torch.float32), expected)
    index = torch.tensor([5, 0, 63])
    assert torch.equal(form.rows(index), expected[index])
    assert torch.equal(form.dense(torch.bfloat16), expected.bfloat16())


@pytest.mark.skipif(not has_packed_kernels(), reason="torch multiplies packed codes by plain loops here")
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_decoded_row_is_near_the_exact_product(kind: str) -> None:
    raw = random_blocks(kind)
    form, exact = (
        Blocks(torch.from_numpy(raw), kind),
        torch.from_numpy(dequantize(raw, gguf.GGMLQuantizationType[kind])),
    )
    hidden = torch.randn(1, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = form.multiply(hidden).float(), hidden.float() @ exact.t()
    four = BLOCK_TYPES[kind].four_bits
    assert type(form.packed) is (Int4 if four else Int8)
    assert float((found - expected).norm() / expected.norm()) < (0.005 if four else 0.02)


# --- files ----------------------------------------------------------------------------------------------


def write_gguf(path: Path, family: str = "qwen2", kinds: tuple[str, ...] = WRITABLE) -> Any:
    """A tiny model's weights in a file, the block types in turn; returns the model with what the file says."""
    from tidekv_llm.models import gguf_file

    model = tiny_model(family, hidden_size=64, intermediate_size=128)
    names = gguf_file._names(model)
    writer = gguf.GGUFWriter(path, family)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        dense = parameter.detach()
        if family == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = 4 if "q_proj" in name else 2
            dense = dense.view(heads, 2, -1, 64).transpose(1, 2).reshape(dense.shape)
        kind = gguf.GGMLQuantizationType[kinds[number % len(kinds)] if dense.dim() == 2 else "F32"]
        data = dense.numpy().copy()
        stored = data if dense.dim() == 1 else gguf.quants.quantize(data, kind)
        writer.add_tensor(names[name], stored, raw_dtype=kind)
        if dense.dim() == 2:
            exact = torch.from_numpy(np.array(dequantize(stored, kind)))
            if family == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
                exact = exact.view(heads, -1, 2, 64).transpose(1, 2).reshape(dense.shape)
            parameter.data = exact
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def mapped(path: Path, exact: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = empty_model(exact.config, dtype)
    file = GgufFile(path, model)
    assert not file.uncovered
    assert can_read(model, file)
    return fill(model, file, 16).eval()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_mapped_file_prefills_as_the_unpacked_model_forwards(tmp_path: Path, family: str) -> None:
    exact = write_gguf(tmp_path / "model.gguf", family)
    with torch.no_grad():
        expected = exact(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    found = TideKV(mapped(tmp_path / "model.gguf", exact), prefill=EVERYTHING).prefill(PROMPT).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_a_mapped_file_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    exact = write_gguf(tmp_path / "model.gguf")
    model = mapped(tmp_path / "model.gguf", exact)
    assert any(isinstance(module, StoredLinear) for module in model.modules())
    assert any(isinstance(module, StoredEmbedding) for module in model.modules())
    llm = TideKV(model, prefill=EVERYTHING)
    norms = sum(parameter.nbytes for parameter in exact.parameters() if parameter.dim() == 1)
    assert llm.shape.weight_bytes < norms + 20_000


def test_a_file_that_changes_while_it_is_mapped_is_one_line_and_the_layers_are_as_before(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    llm = TideKV(mapped(path, write_gguf(path)), prefill=EVERYTHING)
    before = llm.prefill(PROMPT).logits
    kept = path.stat()
    path.touch()
    with pytest.raises(ModelError, match="was changed while it was in use") as caught:
        llm.prefill(PROMPT)
    assert "\n" not in str(caught.value)
    import os

    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert torch.equal(llm.prefill(PROMPT).logits, before)


@pytest.mark.parametrize("keep", [30, 400, 5000])
def test_a_truncated_file_is_one_line(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.gguf"
    exact = write_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="truncated or damaged") as caught:
        GgufFile(path, empty_model(exact.config, torch.float32))
    assert "\n" not in str(caught.value)


def test_what_is_not_covered_says_so(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    exact = write_gguf(path)
    file = GgufFile(path, empty_model(exact.config, torch.float32))
    file._config = tiny_model("gemma2").config
    assert file.uncovered == "of the family gemma2"
