"""The longest prompt under a memory limit, found by trying (Table 6)."""

from __future__ import annotations

import argparse
from typing import Any

from tidekv_llm.arguments import count, names
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
)
from tidekv_llm.bench.task import HF_ONE_SHOT
from tidekv_llm.schedules import schedule_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser, rounds=None)
    parser.add_argument("--memory-limit", default="256MiB", help="beyond the loaded model (default: %(default)s)")
    parser.add_argument("--step", type=count, default=1024, help="resolution in tokens (default: %(default)s)")
    parser.add_argument("--longest", type=count, default=16384, help="where to stop (default: %(default)s)")
    allowed = (HF_ONE_SHOT, *schedule_names())
    parser.add_argument("--methods", type=names(allowed), default=["post-prefill", "tidekv"], help="comma-separated")


def run(harness: Harness) -> Report:
    """Measure and report: each method's longest length by bisection, each try in a process of its own."""
    from tidekv_llm.planner import LEAST_MEMORY
    from tidekv_llm.sizes import parse_bytes

    options = harness.options
    limit = parse_bytes(options.memory_limit, least=LEAST_MEMORY)
    rows = [_row(harness, index, limit) for index in range(len(options.methods))]
    title = f"{options.model}, {options.memory_limit} beyond the loaded model"
    return harness.finish(rows, title=title, plot=lambda figure: _plot(figure, rows))


def _row(harness: Harness, index: int, limit: int) -> Row:
    options = harness.options
    method, most = options.methods[index], max(1, options.longest // options.step)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fraction = (index + 1 - (high - low) / most) / len(options.methods)
        done = harness.try_run(_job(options, method, middle * options.step, limit), fraction)
        low, high = (middle, high) if done is not None and done["completed"] else (low, middle - 1)
    row: Row = {
        "method": method,
        "longest_prompt_tokens": low * options.step,
        "reached_the_end": low == most,
    }
    if low:
        best = harness.try_run(_job(options, method, low * options.step, limit), (index + 1) / len(options.methods))
        row["transient_mib"] = mib(best["transient_bytes"]) if best else None
    return row


def _job(options: argparse.Namespace, method: str, length: int, limit: int) -> Job:
    return measurement_job(
        f"{method} at {length}", options, method, prompt_tokens=length, new_tokens=2, memory_limit=limit
    )


def _plot(figure: Any, rows: list[Row]) -> None:
    labels = [row["method"] for row in rows]
    bars(figure.subplots(), labels, [row["longest_prompt_tokens"] for row in rows], "Longest prompt", "tokens")
