"""Chunk sizes against each other: time to first token and memory (Table 11)."""

from __future__ import annotations

import argparse
from typing import Any

from tidekv_llm.arguments import counts
from tidekv_llm.bench.harness import (
    Harness,
    Job,
    Report,
    Row,
    add_common_arguments,
    add_model_arguments,
    measurement_job,
    mib,
    summary,
)
from tidekv_llm.schedules import schedule_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser)
    parser.add_argument("--sizes", type=counts, default=[256, 512, 1024, 2048, 4096], help="default: 256 to 4096")
    parser.add_argument("--method", choices=schedule_names(), default="tidekv", help="default: %(default)s")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    runs = harness.run([_job(options, size) for size in options.sizes])
    rows = [_row(size, runs[str(size)]) for size in options.sizes]
    title = f"{options.method}, {options.model}, {options.prompt_tokens:,} tokens"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows))


def _job(options: argparse.Namespace, size: int) -> Job:
    return measurement_job(str(size), options, options.method, chunk_size=size, new_tokens=2)


def _row(size: int, runs: list[dict[str, Any]]) -> Row:
    ttft, spread = summary(runs, "ttft_seconds")
    transient, transient_spread = summary(runs, "transient_bytes")
    return {
        "chunk_size": size,
        "ttft_seconds": round(ttft, 3),
        "ttft_spread_seconds": round(spread, 3),
        "transient_mib": mib(transient),
        "transient_spread_mib": mib(transient_spread),
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    times, sizes = [row["ttft_seconds"] for row in rows], [row["transient_mib"] for row in rows]
    axes.plot(times, sizes, marker="o")
    for row, x, y in zip(rows, times, sizes, strict=True):
        axes.annotate(str(row["chunk_size"]), (x, y), textcoords="offset points", xytext=(6, 4))
    axes.set(xlabel="time to first token, s", ylabel="transient, MiB", title="Chunk size")
    axes.grid(alpha=0.3)
