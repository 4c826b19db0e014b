"""save() and load(): the same cache comes back, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cache.test_layouts import SETTINGS, engine
from tests.tiny_models import random_prompt
from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.decode.loop import DecodeAdapter
from tidekv_llm.errors import CacheError


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_loaded_cache_decodes_the_same(setting: str, family: str, tmp_path: Path) -> None:
    llm = engine(family, **SETTINGS[setting])
    cache = llm.prefill(random_prompt(90), reserve=7).cache
    decoder = llm._open().decoder
    DecodeAdapter(decoder, cache, AttentionDispatch()).step(torch.tensor([[5, 6]]))  # decoded tokens are saved too
    path = tmp_path / "a.cache"
    cache.save(path, llm.cache_owner)
    loaded = CompressedCache.load(path, llm.cache_owner)
    assert loaded.nbytes == cache.nbytes
    outputs = []
    for each in (cache, loaded):
        step = DecodeAdapter(decoder, each, AttentionDispatch()).step
        outputs.append([step(torch.tensor([[token]])) for token in (9, 10, 11)])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    for layer in range(3):
        assert torch.equal(cache.positions(layer, 1), loaded.positions(layer, 1))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    llm = engine(head_budget="ada")
    path = tmp_path / "a.cache"
    llm.prefill(random_prompt(90)).cache.save(path, llm.cache_owner)
    return path, llm.cache_owner


def test_the_file_is_the_users_own_and_appears_whole(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["a.cache"]


def test_a_failed_save_leaves_the_old_file(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, owner = saved
    before = path.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tidekv_llm.cache.cache_file.save_file", full_disk)
    with pytest.raises(CacheError, match=r"cannot write the cache to .*No space left"):
        CompressedCache.load(path, owner).save(path, owner)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.cache"]


def test_a_missing_folder_is_a_clear_error(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path, owner = saved
    with pytest.raises(CacheError, match="cannot write the cache to"):
        CompressedCache.load(path, owner).save(tmp_path / "no" / "b", owner)
    with pytest.raises(CacheError, match=r"no cache at .*; save one first"):
        CompressedCache.load(tmp_path / "no" / "b", owner)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.3, 0.9, -1])
def test_a_truncated_file_is_refused(saved: tuple[Path, Any], keep: float) -> None:
    path, owner = saved
    content = path.read_bytes()
    count = int(len(content) * keep) if isinstance(keep, float) else keep
    path.write_bytes(content[:count])
    with pytest.raises(CacheError, match=r"is damaged or no cache of TideKV .*; delete it"):
        CompressedCache.load(path, owner)


def test_foreign_files_are_refused(saved: tuple[Path, Any]) -> None:
    path, owner = saved
    path.write_bytes(b"%PDF-1.7 not a cache at all, but long enough to look at")
    with pytest.raises(CacheError, match="is damaged or no cache"):
        CompressedCache.load(path, owner)
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(CacheError, match="is a safetensors file, but no cache of TideKV"):
        CompressedCache.load(path, owner)
    with pytest.raises(CacheError, match="is damaged or no cache"):
        CompressedCache.load(path.parent, owner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, r"was saved for model='LlamaForCausalLM@[0-9a-f]{16}', this model has 'other'"),
        ({"dtype": "bfloat16"}, "saved for dtype='float32', this model has 'bfloat16'"),
        ({"num_layers": 30}, "saved for num_layers=3"),
        ({"num_kv_heads": 3}, "saved for num_kv_heads=2"),
        ({"head_dim": 64}, "saved for head_dim=8"),
    ],
    ids=str,
)
def test_another_models_cache_is_refused(saved: tuple[Path, Any], change: dict[str, Any], message: str) -> None:
    path, owner = saved
    with pytest.raises(CacheError, match=message):
        CompressedCache.load(path, dataclasses.replace(owner, **change))


def _rewrite(path: Path, change: Any) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors, facts = load_file(path), json.loads(metadata["facts"])
    change(tensors, facts)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, {**metadata, "facts": json.dumps(facts)})


def test_another_version_is_refused(saved: tuple[Path, Any]) -> None:
    path, owner = saved
    _rewrite(path, lambda tensors, facts: facts.update(version=99))
    with pytest.raises(CacheError, match="has cache format 99, this version reads 1; build the cache again"):
        CompressedCache.load(path, owner)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, facts: tensors.pop("1.rows.keys"),
        lambda tensors, facts: tensors.update({"1.rows.values": tensors["1.rows.values"][:-1]}),
        lambda tensors, facts: tensors.update({"1.rows.keys": tensors["1.rows.keys"].half()}),
        lambda tensors, facts: tensors.update({"0.kept_positions": tensors["0.kept_positions"] + 90}),
        lambda tensors, facts: tensors.update({"0.kept_positions": tensors["0.kept_positions"].flip(0)}),
        lambda tensors, facts: facts["layers"].pop(),
        lambda tensors, facts: facts["layers"][0].update(layout="spiral"),
        lambda tensors, facts: facts["layers"][0].update(head_lens=[1, 2]),
        lambda tensors, facts: facts["layers"][0].pop("logical"),
        lambda tensors, facts: facts.pop("layers"),
    ],
    ids=["lost", "short", "half", "positions", "order", "layers", "layout", "lens", "logical", "no layers"],
)
def test_contents_that_do_not_fit_are_refused(saved: tuple[Path, Any], change: Any) -> None:
    path, owner = saved
    _rewrite(path, change)
    with pytest.raises(CacheError, match="is damaged or no cache"):
        CompressedCache.load(path, owner)
