"""The README's table: transformers' one-shot, the matched post-prefill SnapKV, and TideKV at three chunk sizes."""

from __future__ import annotations

import argparse
from typing import Any

from tidekv_llm.arguments import count, counts
from tidekv_llm.bench.harness import (
    Harness,
    Job,
    Report,
    Row,
    add_common_arguments,
    add_model_arguments,
    bars,
    measurement_job,
    mib,
    model_fields,
    summary,
)
from tidekv_llm.bench.task import HF_ONE_SHOT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser)
    parser.add_argument("--sizes", type=counts, default=[512, 1024, 2048], help="chunk sizes (default: 512,1024,2048)")
    parser.add_argument("--new-tokens", type=count, default=33, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--no-fidelity", action="store_true", help="leave out the hidden states")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    methods = [(HF_ONE_SHOT, options.chunk_size), ("post-prefill", options.chunk_size)]
    methods += [("tidekv", size) for size in options.sizes]
    jobs = [_job(options, method, size) for method, size in methods]
    runs = harness.run(jobs)
    rows = [_row(method, size, runs[_label(method, size)]) for method, size in methods]
    base = rows[0]
    for row in rows:
        row["ttft_ratio"] = round(row["ttft_seconds"] / base["ttft_seconds"], 3)
        row["decode_ratio"] = round(row["decode_tokens_per_second"] / base["decode_tokens_per_second"], 2)
    if not options.no_fidelity:
        _add_fidelity(options, harness, rows)
    title = f"{options.model}, {options.prompt_tokens:,} tokens, kept {options.kept_tokens:,}"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows))


def _label(method: str, size: int) -> str:
    return f"tidekv, chunk {size}" if method == "tidekv" else method


def _job(options: argparse.Namespace, method: str, size: int) -> Job:
    new_tokens = max(2, options.new_tokens)
    return measurement_job(_label(method, size), options, method, chunk_size=size, new_tokens=new_tokens)


def _row(method: str, size: int, runs: list[dict[str, Any]]) -> Row:
    ttft, spread = summary(runs, "ttft_seconds")
    transient, transient_spread = summary(runs, "transient_bytes")
    return {
        "method": _label(method, size),
        "transient_mib": mib(transient),
        "transient_spread_mib": mib(transient_spread),
        "ttft_seconds": round(ttft, 3),
        "ttft_spread_seconds": round(spread, 3),
        "compress_share_percent": round(100 * summary(runs, "compress_share")[0], 2),
        "decode_tokens_per_second": round(summary(runs, "decode_tokens_per_second")[0], 2),
    }


def _add_fidelity(options: argparse.Namespace, harness: Harness, rows: list[Row]) -> None:
    """Relative L2 of hidden states against one-shot, and the chunk-major floor of the same run, per chunk size."""
    for row, size in zip(rows[2:], options.sizes, strict=True):
        chosen = {"chunk_size": size, "prompt_index": 0, "methods": ["chunked", "tidekv"], "budgets": []}
        job = Job(f"fidelity, chunk {size}", "fidelity:compare", model_fields(options) | chosen)
        found = harness.try_run(job, 1.0)
        if found is not None:
            row["relative_l2"] = found["methods"]["tidekv"]["relative_l2"]
            row["chunked_relative_l2"] = found["methods"]["chunked"]["relative_l2"]


def _plot(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    labels = [row["method"] for row in rows]
    bars(left, labels, [row["transient_mib"] for row in rows], "Memory to build the cache", "MiB")
    bars(right, labels, [row["ttft_seconds"] for row in rows], "Time to first token", "s")
