"""The benchmark harness on tiny models: numbers mean what they say, runs resume, commands answer."""

from __future__ import annotations

import argparse
import csv
import json

import pytest
import torch

from tests.tiny_models import random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.bench import harness as harness_module
from tidekv_llm.bench.cli import BENCHMARKS, available
from tidekv_llm.bench.fidelity import METHODS, compare_schedules
from tidekv_llm.bench.harness import Harness, Job
from tidekv_llm.bench.persistent import serve_requests, trace
from tidekv_llm.cli import main

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


def test_results_carry_the_environment(options, capsys):
    Harness("demo", options).finish([{"method": "a", "value": 1.5, "list": [1]}])
    result = json.loads((options.out / "demo.json").read_text())
    assert result["rows"] == [{"method": "a", "value": 1.5, "list": [1]}]
    assert result["environment"]["torch"] == torch.__version__
    with (options.out / "demo.csv").open() as file:
        row = next(csv.DictReader(file))
    assert row["value"] == "1.5"
    assert row["env_torch"] == torch.__version__
    assert json.loads(capsys.readouterr().out)["benchmark"] == "demo"


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


def test_all_benchmarks_are_known():
    assert set(available()) <= set(BENCHMARKS)
    assert {"headline", "fidelity", "memory", "latency", "chunks", "persistent", "capacity"} <= set(available())


def test_plan_prints_json_and_a_table(capsys):
    command = ["plan", "--model", "random:llama-3.1-8b", "--context", "65536", "--device-memory", "24GiB"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        assert {"schedule", "peak_allocated_bytes", "transient_bytes", "components", "fits"} <= set(row)
    tide = next(row for row in rows if row["schedule"] == "tidekv")
    assert tide["components"]["compressed_cache"] == 512 * 2**20
    assert tide["fits"] is True
    assert main(command) == 0
    assert "post-prefill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "--device-memory", "lots"], 2, "is no size"),
        (["plan", "--context", "0"], 2, "--context=0"),
        (["plan", "--context", "1" + 26 * "0"], 2, "must be at most"),
        (["plan", "--model", "random:nothing"], 1, "llama-3.1-8b"),
        (["bench", "nothing"], 2, "invalid choice"),
        (["bench", "memory", "--methods", "nothing"], 2, "unknown"),
        (["bench", "selectors", "--depths", "2"], 2, "depths from 0 to 1"),
        (["bench", "selectors", "--numbers", "74223,x"], 2, "'x' must have 5 to 12 digits"),
        (["bench", "selectors", "--haystacks", "hay"], 2, "choose from prose"),
        (["bench", "selectors", "--numbers", ""], 2, "it is empty"),
        (["bench", "selectors", "--kept-tokens", "512,30"], 2, "--kept-tokens=30 must be at least 68"),
        (["bench", "selectors", "--prompt-tokens", "900"], 2, "--kept-tokens=1024 must be"),
        (["bench", "selectors", "--model", "random:smollm2-135m"], 2, "has no tokenizer"),
        (["bench", "capacity", "--step", "0"], 2, "'0' must be a whole number"),
        (["bench", "memory", "--methods", ""], 2, "it is empty"),
        (["bench", "memory", "--model", "no/such", "--lengths", "64"], 1, "no model 'no/such'"),
        (["plan", "--device-memory", ""], 2, "is no size"),
        (["bench", "fidelity", "--prompts", "0"], 2, "'0' must be a whole number of at least 1"),
        (["bench", "fidelity", "--kept-tokens", "3"], 2, "kept_tokens=3"),
        (["bench", "persistent", "--requests", "7"], 2, "must be at least 15"),
        (["bench", "capacity", "--memory-limit", "256"], 2, "write a unit, such as 24GiB"),
        (["bench", "chunks", "--sizes", ","], 2, "it is empty"),
        (["bench", "sessions", "--document-tokens", "x"], 2, "'x' must be a whole number"),
        (["plan", "--device-memory", "24"], 2, "write a unit, such as 24GiB"),
        (["bench", "memory", "--out", "/dev/null/x"], 2, "cannot be made a folder"),
    ],
)
def test_bad_input_is_one_line(arguments, code, message, capsys):
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


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
    from tidekv_llm.bench.children import run_child
    from tidekv_llm.bench.task import Measurement

    what = Measurement(
        method="tidekv", model="random:smollm2-135m", layers=2, prompt_tokens=131_072, chunk_size=2048, new_tokens=2
    )
    found = run_child(what)
    assert found["ttft_seconds"] < 600
    assert found["transient_bytes"] < 2**30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_transient_is_80_percent_below_post_prefill_at_16384_tokens():
    """Two layers have the transient of thirty: only one is active at a time."""
    from tidekv_llm.bench.children import run_child
    from tidekv_llm.bench.task import Measurement

    found = {
        method: run_child(
            Measurement(method=method, model="random:smollm2-135m", layers=2, prompt_tokens=16_384, new_tokens=2)
        )["above_steady_bytes"]
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
