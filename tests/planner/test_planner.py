"""The planner against the paper's measurements and against the exact tracker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tiny_models import FAMILIES, random_prompt, tiny_model
from tests.tools.live_bytes import LiveBytes
from tidekv_llm import PrefillConfig, TideKV, attention, planner
from tidekv_llm.costs.plan import Plan
from tidekv_llm.errors import ConfigError, MemoryLimitError, ModelNotFoundError
from tidekv_llm.models.shapes import find_config, shape_of_config
from tidekv_llm.planner import choose_chunk_size, longest_prompt, plan_table, predict
from tidekv_llm.schedules import schedule_names
from tidekv_llm.shapes import ModelShape

GIB, MIB = 2**30, 2**20
TILE = 256 * 1024


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape_of_config(find_config("random:llama-3.1-8b"))


def at(shape: ModelShape, length: int, **changes: object) -> Plan:
    return Plan(shape, length, PrefillConfig(kept_tokens=4096, chunk_size=2048).replace(**changes))


def test_llama_has_its_published_parameters(llama):
    assert llama.weight_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "length", "peak_gib", "tolerance"),
    [("tidekv", 65536, 16.639, 0.03), ("tidekv", 131072, 17.5, 0.03), ("post-prefill", 65536, 22.748, 0.10)],
)
def test_published_peaks_of_llama_8b(llama, schedule, length, peak_gib, tolerance):
    assert predict(schedule, at(llama, length)).peak_allocated_bytes / GIB == pytest.approx(peak_gib, rel=tolerance)


def test_published_steady_state_and_terms(llama):
    at_64k, at_128k = (predict("tidekv", at(llama, length)) for length in (65536, 131072))
    assert at_64k.steady_bytes / GIB == pytest.approx(15.466, rel=0.001)
    assert at_64k.components["compressed_cache"] == at_128k.components["compressed_cache"] == 512 * MIB
    assert at_128k.components["active_kv"] == GIB // 2
    assert at_128k.components["bridge"] == GIB
    assert sum(at_64k.at_peak.values()) == at_64k.peak_allocated_bytes


def test_published_transient_reduction_at_64k(llama):
    """83.89% in the paper; both methods end in the same steady state."""
    tide, post = (predict(name, at(llama, 65536)) for name in ("tidekv", "post-prefill"))
    assert tide.steady_bytes == post.steady_bytes
    assert 1 - tide.transient_bytes / post.transient_bytes == pytest.approx(0.8389, abs=0.05)


def test_what_fits_a_24_gib_card_is_what_the_paper_found(llama):
    """Table 6: SnapKV completes 64K and runs out at 128K; TideKV completes 128K."""
    fits = {
        (name, length): predict(name, at(llama, length)).fits(24 * GIB)
        for name in ("tidekv", "post-prefill")
        for length in (65536, 131072)
    }
    assert fits == {
        ("tidekv", 65536): True,
        ("tidekv", 131072): True,
        ("post-prefill", 65536): True,
        ("post-prefill", 131072): False,
    }


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("backend", ["merge", "tiled"])
@pytest.mark.parametrize("schedule", schedule_names())
def test_predictions_equal_the_exact_tracker(schedule, backend, dtype, compute, monkeypatch):
    monkeypatch.setattr(attention, "TILE_BYTES", TILE)
    monkeypatch.setattr(attention.TiledAttention.__init__, "__defaults__", (TILE,))
    model = tiny_model(
        hidden_size=128,
        intermediate_size=384,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=4,
    ).to(dtype)
    config = PrefillConfig(chunk_size=128, kept_tokens=256, schedule=schedule, score_block_size=128, attention=backend)
    llm = TideKV(model, prefill=config, compute_dtype=compute)
    prompt = torch.tensor(random_prompt(2048))
    llm.prefill(prompt[:64])
    with LiveBytes() as tracker:
        prefilled = llm.prefill(prompt)
        steady = tracker.live_bytes
    assert prefilled.next_position == 2048
    prediction = predict(schedule, Plan(llm.shape, 2048, config, device="cpu"))
    found = prediction.peak_allocated_bytes - llm.shape.weight_bytes
    assert found == pytest.approx(tracker.peak_bytes, rel=0.05)
    assert prediction.steady_bytes - llm.shape.weight_bytes == pytest.approx(steady, abs=0.05 * tracker.peak_bytes)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama4_text",)])
def test_a_config_tells_what_a_loaded_model_tells(family):
    model = tiny_model(family)
    llm = TideKV(model)
    assert shape_of_config(model.config, dtype="float32") == llm.shape


def test_sliding_window_layers_keep_their_window_only(llama):
    windows = (1024,) * 16 + (None,) * 16
    prediction = predict("tidekv", at(replace(llama, windows=windows), 65536))
    assert prediction.components["compressed_cache"] == (512 + 128) // 2 * MIB


def test_batch_multiplies_everything_but_the_weights(llama):
    one, two = (predict("tidekv", replace(at(llama, 32768), batch=batch)) for batch in (1, 2))
    for name, size in one.components.items():
        assert two.components[name] == (size if name == "weights" else pytest.approx(2 * size, rel=0.05))


def test_the_longest_prompt_is_the_last_that_fits(llama):
    plan = at(llama, 1)
    longest = longest_prompt("tidekv", plan, 24 * GIB)
    assert predict("tidekv", at(llama, longest)).fits(24 * GIB)
    assert not predict("tidekv", at(llama, longest + 256)).fits(24 * GIB)
    assert longest_prompt("tidekv", plan, 8 * GIB) == 0


def test_a_host_bridge_takes_the_bridge_off_the_device(llama):
    near, far = (predict("tidekv", at(llama, 131072, bridge=bridge)) for bridge in ("device", "host"))
    assert far.host_bytes == GIB
    assert near.peak_allocated_bytes - far.peak_allocated_bytes > 0.9 * GIB


def test_a_split_mlp_lowers_the_activations(llama):
    whole, split = (predict("post-prefill", at(llama, 65536, mlp_chunk_size=size)) for size in (0, 2048))
    assert split.components["activations"] < 0.5 * whole.components["activations"]


def test_auto_takes_each_schedules_recommended_chunk(llama):
    rows = plan_table(at(llama, 65536, chunk_size="auto"), 24 * GIB)
    assert {row.prediction.schedule for row in rows} == set(schedule_names())
    tide = next(row for row in rows if row.prediction.schedule == "tidekv")
    assert tide.recommended_chunk_size == 2048
    assert tide.fits
    assert tide.as_dict()["components"]["compressed_cache"] == 512 * MIB
    without = plan_table(at(llama, 65536), None)
    assert without[0].fits is None


def test_the_engine_refuses_before_it_allocates(monkeypatch):
    llm = TideKV(tiny_model(), prefill=PrefillConfig(chunk_size="auto", kept_tokens=64))
    assert llm.prefill(random_prompt(200)).metrics.chunk_size in planner.CHUNK_SIZES
    monkeypatch.setattr(planner, "available_bytes", lambda device: 100_000)
    with (
        LiveBytes() as tracker,
        pytest.raises(MemoryLimitError, match=r"tidekv needs .* for 200 tokens") as caught,
    ):
        llm.prefill(random_prompt(200))
    assert tracker.peak_bytes < 10_000
    assert "\n" not in str(caught.value)


def test_the_largest_chunk_that_fits_is_taken(llama):
    config = PrefillConfig(chunk_size="auto")
    chunks = []
    for free in (30 * GIB, int(2.2 * GIB)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "_free", lambda device, free=free: free)
            chunks.append(choose_chunk_size(llama, 131072, config, "cuda"))
    assert chunks[0] == 2048
    assert chunks[1] <= 2048


def test_auto_leaves_room_for_the_answer(llama, monkeypatch):
    """Whatever is free: a chunk chosen for prompt and answer is refused only where the smallest one is, too."""
    config, length, reserve = PrefillConfig(chunk_size="auto"), 65536, 16384
    smallest = config.replace(chunk_size=planner.CHUNK_SIZES[-1])
    least = predict("tidekv", Plan(llama, length, smallest, reserve=reserve)).peak_allocated_bytes - llama.weight_bytes
    for spare in range(0, 2 * GIB, GIB // 8):
        monkeypatch.setattr(planner, "_free", lambda device, free=least + spare: free)
        chunk = choose_chunk_size(llama, length, config, "cuda", reserve)
        planner.require_memory(llama, length, config.replace(chunk_size=chunk), "cuda", reserve)


def test_bad_input_names_the_remedy(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"llama-3\.1-8b"):
        find_config("random:nothing")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_config(str(tmp_path / "config.json"))
