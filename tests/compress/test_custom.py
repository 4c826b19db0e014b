"""Selectors that users write, several compressors on one prefill, and the sweep's own arithmetic."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.compress.layers import random_layer
from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm.bench.selectors import EVERYTHING, Outcome, describe, settings, tabulate, verdict
from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.fan_out import FanOut
from tidekv_llm.compress.keep_everything import KeepEverything
from tidekv_llm.compress.layer_end import select_per_head, select_positions
from tidekv_llm.compress.selectors import H2O, ChunkKV, Scorer, Selector, selector_names
from tidekv_llm.config import SELECTORS, PrefillConfig
from tidekv_llm.engine import TideKV
from tidekv_llm.errors import ConfigError, SelectorError
from tidekv_llm.memory import MemoryMeter
from tidekv_llm.prefill.layer_major import run_layer_major
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.request import Request

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_selector.py"


@dataclass(frozen=True)
class Places(Selector):
    """Indices that the test computes; not registered."""

    name: ClassVar[str] = "places"
    choose: Callable[[FullLayer, int], Tensor]

    def indices(self, layer: FullLayer, count: int, first: int, last: int) -> Tensor:
        return self.choose(layer, count)

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        raise AssertionError("indices come first")


def select(choose: Callable[[FullLayer, int], Tensor], **options: Any) -> list[int]:
    kept = select_positions(random_layer(60), Places(choose), 25, window_size=16, sinks=4, block_size=8, **options)
    return kept.indices[0, 1].tolist()


def test_a_selector_may_choose_places_itself() -> None:
    places = torch.tensor([40, 4, 43, 9, 20]).expand(1, 2, -1)
    assert select(lambda layer, count: places) == [0, 1, 2, 3, 4, 9, 20, 40, 43, *range(44, 60)]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([4, 5, 6, 7], r"gave indices of shape \(1, 2, 4\)"),
        ([4, 5, 6, 7, 8, 9], r"where whole numbers \(1, 2, 5\)"),
        ([4.0, 5.0, 6.0, 7.0, 8.0], "torch.float32 where whole numbers"),
        ([3, 5, 6, 7, 8], r"from 3 to 8 in layer 1, outside the range \[4, 44\)"),
        ([4, 5, 6, 7, 44], "from 4 to 44"),
        ([4, 5, 6, 7, 10**9], "from 4 to 1000000000"),
        ([-1, 5, 6, 7, 8], "from -1 to 8"),
        ([4, 5, 5, 7, 8], "twice in layer 1"),
    ],
    ids=str,
)
def test_places_that_cannot_be_are_an_error(places: list[float], message: str) -> None:
    with pytest.raises(SelectorError, match=message):
        select(lambda layer, count: torch.tensor(places).expand(1, 2, -1))


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (None, "gave NoneType where scorer"),
        (lambda start, stop: [0.0] * (stop - start), "gave list where a tensor of shape"),
        (lambda start, stop: torch.zeros(1, 2, stop - start, dtype=torch.complex64), "gave torch.complex64"),
        (lambda start, stop: torch.zeros(1, 2, stop - start, device="meta"), "on meta, not"),
    ],
    ids=["none", "list", "complex", "elsewhere"],
)
def test_scores_that_are_none_are_an_error(scorer: Any, message: str) -> None:
    class Wrong(Selector):
        name: ClassVar[str] = "wrong"

        def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
            return scorer  # type: ignore[no-any-return]

    with pytest.raises(SelectorError, match=message):
        select_positions(random_layer(60), Wrong(), 25, window_size=16, sinks=4, block_size=8)


def test_places_that_are_no_tensor_are_an_error() -> None:
    with pytest.raises(SelectorError, match="gave indices as list"):
        select(lambda layer, count: [4, 5, 6, 7, 8])  # type: ignore[arg-type,return-value]


def test_a_selector_without_a_name_is_refused() -> None:
    class Nameless(Selector):
        def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
            raise AssertionError

    with pytest.raises(ConfigError, match="selector Nameless has no name"):
        PrefillConfig(selector=Nameless())


def test_places_cannot_be_compared_between_heads_or_layers() -> None:
    def never(layer: FullLayer, count: int) -> Tensor:
        raise AssertionError

    with pytest.raises(SelectorError, match="chooses indices, but layer_budget='cake' compares scores"):
        select(never, rank_all=True)
    with pytest.raises(SelectorError, match="chooses indices, but head_budget='ada' compares scores"):
        select_per_head(random_layer(60), Places(never), 25, window_size=16, sinks=4, block_size=8, floor_alpha=0.5)


def test_the_example_is_short_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    spec = importlib.util.spec_from_file_location("custom_selector_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    try:
        assert "long-values" in selector_names()
        config = PrefillConfig(kept_tokens=24, selector="long-values", head_budget="ada", layer_budget="cake")
        cache = TideKV(tiny_model(), prefill=config).prefill(random_prompt(90)).cache
        assert sum(len(cache.positions(layer, head)) for layer in range(3) for head in range(2)) == 144
    finally:
        SELECTORS.pop("long-values")


def test_which_selectors_need_every_query() -> None:
    assert H2O().needs_all_queries
    assert not ChunkKV().needs_all_queries
    assert ChunkKV(tokens=H2O()).needs_all_queries


def test_one_prefill_for_many_compressors_gives_what_each_alone_gives() -> None:
    base = {"kept_tokens": 24, "sinks": 2, "kernel_size": 3, "chunk_size": 20}
    configs = [
        PrefillConfig(**base, **options)  # type: ignore[arg-type]
        for options in (
            {"window_size": 4},
            {"window_size": 16},
            {"selector": "h2o"},
            {"selector": "expected-attention", "head_budget": "ada"},
            {"selector": "chunkkv", "layer_budget": "cake"},
        )
    ]
    llm, prompt = TideKV(tiny_model("gemma3_text")), random_prompt(90)
    decoder = llm.decoder
    fan_out = FanOut([Compressor(config, 3, 90, 0, decoder.full_layers) for config in configs])
    with MemoryMeter(decoder.device, weights=0) as meter, torch.no_grad():
        run_layer_major(
            decoder, torch.tensor([prompt]), PrefillTask(PrefillConfig(), Request(), meter), fan_out, chunk_size=20
        )
    for config, cache in zip(configs, fan_out.caches, strict=True):
        alone = TideKV(llm.model, prefill=config).prefill(prompt).cache
        for layer in range(3):
            for head in range(2):
                assert torch.equal(cache.positions(layer, head), alone.positions(layer, head))


def test_one_prefill_ends_layers_in_any_way() -> None:
    """A compressor and keep-everything side by side, each as if it were alone."""
    llm, prompt = TideKV(tiny_model("gemma3_text")), random_prompt(90)
    config = PrefillConfig(kept_tokens=24, window_size=4, chunk_size=20)
    fan_out = FanOut([KeepEverything(4, 0), Compressor(config, 3, 90, 0, llm.decoder.full_layers)])
    with MemoryMeter(llm.decoder.device, weights=0) as meter, torch.no_grad():
        task = PrefillTask(config, Request(), meter)
        built = run_layer_major(llm.decoder, torch.tensor([prompt]), task, fan_out, chunk_size=20)
    assert built.evidence is None
    alone = [llm.with_prefill(config.replace(schedule=name)) for name in ("tidekv-no-evict", "tidekv")]
    for cache, engine in zip(fan_out.caches, alone, strict=True):
        expected = engine.prefill(prompt).cache
        assert cache.nbytes == expected.nbytes
        for layer in range(3):
            assert torch.equal(cache.positions(layer, 1), expected.positions(layer, 1))
            assert torch.equal(cache.keys(layer, 1), expected.keys(layer, 1))


def test_settings_have_names_of_their_own() -> None:
    names = [describe(outcome(True, **setting)) for setting in settings()]
    assert len(set(names)) == len(names)
    assert names[0] == "snapkv, W=16, max 21"


def test_the_verdict_can_go_both_ways() -> None:
    rows = [*outcomes(2), *outcomes(2, window_size=8), *outcomes(3, selector="keydiff")]
    assert verdict(rows) == "No SnapKV setting answers more right than the defaults (2 of 3)"
    better = "The defaults answer 2 of 3 right; better, with 3: snapkv, W=32, max 21"
    assert verdict([*rows, *outcomes(3, window_size=32)]) == better


def test_a_row_counts_its_needles_in_all_and_in_each_haystack() -> None:
    rows = tabulate([outcome(True), outcome(False), outcome(True, haystack="noise"), outcome(True, kept=0)])
    assert rows[0] == {
        "setting": "snapkv, W=16, max 21", "kept_tokens": 512, "needles": 3, "found": 2, "prose": 1, "noise": 1,
    }  # fmt: skip
    assert rows[1]["setting"] == EVERYTHING


@pytest.mark.parametrize("answer", ["74223616", "It is 742236", "97422361 or so", "1 742 2361", ""])
def test_another_number_is_not_the_needle(answer: str) -> None:
    assert not Outcome({}, 512, "prose", "7422361", 0.5, answer).found


def outcomes(found: int, **setting: Any) -> list[Outcome]:
    return [outcome(index < found, **setting) for index in range(3)]


def outcome(found: bool, *, kept: int = 512, haystack: str = "prose", **setting: Any) -> Outcome:
    return Outcome(setting, kept, haystack, "7422361", 0.5, "It is 7422361." if found else "It is 742.")
