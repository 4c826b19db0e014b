"""The benchmark harness on tiny models: numbers mean what they say, runs resume, commands answer."""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict
from functools import partial

import pytest
import torch

from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.bench import decode_rate, sessions
from tidekv_llm.bench import harness as harness_module
from tidekv_llm.bench.fidelity import METHODS, compare_schedules
from tidekv_llm.bench.harness import Harness, Job
from tidekv_llm.bench.persistent import serve_requests, trace
from tidekv_llm.cli import main
from tidekv_llm.errors import ConfigError

RANDOM = ["--model", "random:smollm2-135m", "--layers", "2", "--kept-tokens", "64", "--chunk-size", "128"]


@pytest.fixture
def options(tmp_path) -> argparse.Namespace:
    return argparse.Namespace(out=tmp_path / "out", fresh=False, rounds=3, json=True)


def echo(calls: list[str]):
    def run(function, arguments, **_):
        calls.append(arguments["name"])
        return {"value": len(calls)}

    return run


def test_rounds_alternate_and_an_interruption_resumes(options, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(harness_module, "run_job", echo(calls))
    jobs = [Job(name, "x:y", {"name": name}) for name in ("a", "b")]
    first = Harness("demo", options).run(jobs)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    log = options.out / "demo.runs.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:4], lines[4][:20]]))  # killed while writing the fifth
    calls.clear()
    again = Harness("demo", options).run(jobs)
    assert calls == ["a", "b"]
    assert [run["value"] for run in again["a"]][:2] == [run["value"] for run in first["a"]][:2]
    options.fresh = True
    calls.clear()
    Harness("demo", options).run(jobs)
    assert len(calls) == 6


def test_results_carry_the_environment(options, monkeypatch):
    monkeypatch.setattr(harness_module, "run_job", echo([]))
    harness = Harness("demo", options)
    harness.run([Job("a", "x:y", {"name": "a"})])
    report = harness.finish([{"method": "a", "value": 1.5, "list": [1]}])
    assert report.columns == ["method", "value"]
    result = json.loads((options.out / "demo.json").read_text())
    assert result["rows"] == [{"method": "a", "value": 1.5, "list": [1]}]
    assert result["environment"]["torch"] == torch.__version__
    with (options.out / "demo.csv").open() as file:
        row = next(csv.DictReader(file))
    assert row["value"] == "1.5"
    assert row["env_torch"] == torch.__version__
    assert result == {**report.result, "runs": None}
    assert result["benchmark"] == "demo"


def test_fidelity_separates_delayed_from_immediate_eviction():
    """Table 8's order, in float32 on a tiny model."""
    config = PrefillConfig(chunk_size=64, kept_tokens=48, window_size=8)
    llm = TideKV(tiny_model("llama"), prefill=config)
    found = compare_schedules(llm, random_prompt(512), methods=METHODS, budgets=(32, 48, 256))
    error = {method: figures["relative_l2"] for method, figures in found["methods"].items()}
    assert max(error["chunked"], error["tidekv-no-evict"], error["tidekv"]) < 1e-5
    assert error["block-snapkv"] > 100 * error["tidekv"]
    assert error["block-recent"] > 100 * error["tidekv"]
    assert len(found["methods"]["tidekv"]["per_chunk"]) == 8
    assert found["methods"]["tidekv"]["top1_agreement"] == 1.0
    # Nothing was evicted before the first chunk was through; a larger budget drifts less.
    assert found["methods"]["block-snapkv"]["per_chunk"][0] < 1e-5
    assert found["budgets"]["block-snapkv"]["256"] < found["budgets"]["block-snapkv"]["32"]


def test_a_persistent_process_does_not_grow():
    llm = TideKV(tiny_model("llama"), prefill=PrefillConfig(chunk_size=64, kept_tokens=64))
    prompts = [random_prompt(length) for length in (100, 400, 200)]
    run = {"cycle": 3, **serve_requests(llm, prompts, 24, 2)}
    assert trace(run)["change"] < 2**20


def test_the_trace_finds_growth_where_there_is_some():
    growing = {"cycle": 5, "after_bytes": [1000 * number for number in range(50)]}
    assert trace(growing)["slope"] == pytest.approx(1000)
    assert trace(growing)["change"] == pytest.approx(35_000)
    assert trace({"cycle": 5, "after_bytes": [7] * 50})["slope"] == 0


def test_progress_says_which_run_of_how_many(options, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(harness_module, "run_job", echo(calls))
    told: list[tuple[float, str]] = []
    options.rounds = 2
    jobs = [Job(name, "x:y", {"name": name}) for name in ("a", "b")]
    Harness("demo", options, lambda *about: told.append(about)).run(jobs)
    assert told == [(0, "1 of 4: a"), (0.25, "2 of 4: b"), (0.5, "3 of 4: b"), (0.75, "4 of 4: a")]


def test_what_cannot_be_leaves_no_folder(options):
    options.kept_tokens, options.chunk_size = 3, 64
    with pytest.raises(ConfigError, match="kept_tokens=3"):
        Harness("demo", options)
    assert not options.out.exists()


def test_sessions_are_reported_like_the_others(options, monkeypatch):
    found = {
        "document_tokens": 800, "store_bytes": 2**20, "same_answer": True, "notes": [], "reused_prefix_tokens": 700,
        "first_ttft_seconds": 2.0, "second_ttft_seconds": 0.1, "third_ttft_seconds": 0.2, "again_ttft_seconds": 2.0,
        "first_peak_bytes": 2**21, "second_peak_bytes": 2**20, "again_peak_bytes": 2**21,
    }  # fmt: skip
    asked = []
    monkeypatch.setattr(harness_module, "run_job", lambda function, arguments: asked.append(arguments) or found)
    options.model, options.document_tokens, options.kept_tokens, options.chunk_size = "m", 800, 64, 128
    options.stores, options.rounds = ["memory", "int8"], 1
    report = sessions.run(Harness("sessions", options))
    assert [one["store"] for one in asked] == [row["store"] for row in report.rows] == ["memory", "int8"]
    assert report.rows[0]["second_over_first_percent"] == 5
    assert {path.name for path in report.paths} >= {"sessions.json", "sessions.csv"}
    assert all(path.exists() for path in report.paths)


def test_decode_rates_of_every_variant():
    llm = TideKV(tiny_model("llama"), prefill=PrefillConfig(chunk_size=64, kept_tokens=64))
    found = decode_rate.decode_rates(llm, random_prompt(200), new_tokens=3, repeats=2)
    ways = [decode_rate.TRANSFORMERS, "the model's own layers", *decode_rate.VARIANTS, "8 answers at once"]
    assert list(found) == ways
    assert all(len(figures["rates"]) == 2 and min(figures["rates"]) > 0 for figures in found.values())
    sizes = {name: figures["cache_bytes"] for name, figures in found.items()}
    assert sizes["2 bits"] < sizes["4 bits"] < sizes["8 bits"] < sizes["flattened"]
    json.dumps(found)


@pytest.mark.slow
def test_a_benchmark_from_end_to_end(tmp_path, capsys):
    command = ["bench", "memory", "--lengths", "1024", "--out", str(tmp_path), *RANDOM]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["post-prefill", "tidekv"]
    assert (tmp_path / "memory.csv").exists()
    assert not (tmp_path / "memory.runs.jsonl").exists()  # finished: the next call measures anew


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_prompt_of_131072_tokens_in_ten_minutes_and_one_gib(tmp_path):
    """The embedded model's shape with two random layers, in a fresh process."""
    from tidekv_llm.bench.children import run_job
    from tidekv_llm.bench.task import Measurement

    what = Measurement(
        method="tidekv", model="random:smollm2-135m", layers=2, prompt_tokens=131_072, chunk_size=2048, new_tokens=2
    )
    found = run_job("measure:measure_job", asdict(what))
    assert found["ttft_seconds"] < 600
    assert found["transient_bytes"] < 2**30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_transient_is_80_percent_below_post_prefill_at_16384_tokens():
    """Two layers have the transient of thirty: only one is active at a time."""
    from tidekv_llm.bench.children import run_job
    from tidekv_llm.bench.task import Measurement

    what = partial(Measurement, model="random:smollm2-135m", layers=2, prompt_tokens=16_384, new_tokens=2)
    found = {
        method: run_job("measure:measure_job", asdict(what(method=method)))["above_steady_bytes"]
        for method in ("tidekv", "post-prefill")
    }
    assert found["tidekv"] < 0.2 * found["post-prefill"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fidelity_on_the_embedded_model(embedded_model_path):
    """One prompt of real text in bf16 or float32, whatever the machine multiplies well."""
    from tidekv_llm.bench.fidelity import compare

    found = compare(
        model="smollm2-135m", layers=None, prompt_tokens=4096, kept_tokens=512, chunk_size=512, prompt_index=0,
        methods=METHODS, budgets=(),
    )["methods"]  # fmt: skip
    floor = found["chunked"]["relative_l2"]
    assert found["tidekv"]["relative_l2"] <= 1.1 * floor
    assert found["tidekv-no-evict"]["relative_l2"] <= 1.1 * floor
    assert found["block-snapkv"]["relative_l2"] > 3 * floor
    assert found["block-recent"]["relative_l2"] > found["block-snapkv"]["relative_l2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_150_mixed_requests_on_the_embedded_model(embedded_model_path):
    from tidekv_llm.bench.children import run_job

    run = run_job(
        "persistent:serve",
        {
            "method": "tidekv", "model": "smollm2-135m", "layers": None, "kept_tokens": 256, "chunk_size": 256,
            "requests": 150, "cycle": [128, 768, 256, 1024, 512], "new_tokens": 2,
        },
    )  # fmt: skip
    found = trace(run)
    assert abs(found["change"]) < 2**20
    assert abs(found["slope"]) < max(3 * found["slope_error"], 4096)


def test_a_childs_result_comes_back():
    """Through a real process, with a function that costs nothing; its other output does not disturb."""
    from tidekv_llm.bench.children import ChildFailed, run_job

    assert run_job("children:echo", {"value": 3}) == {"value": 3}
    with pytest.raises(ChildFailed, match="exit code 1"):
        run_job("children:echo", {"wrong": 3})
