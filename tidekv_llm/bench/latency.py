"""Time to first token, decode rate and compression share of the schedules (Tables 9 and 10)."""

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
    summary,
)
from tidekv_llm.bench.task import HF_ONE_SHOT
from tidekv_llm.schedules import schedule_names

MATCHED = "post-prefill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser)
    allowed = (HF_ONE_SHOT, *schedule_names())
    default = [HF_ONE_SHOT, MATCHED, "tidekv"]
    parser.add_argument("--methods", type=names(allowed), default=default, help=f"of {', '.join(allowed)}")
    parser.add_argument("--new-tokens", type=count, default=32, help="tokens to decode (default: %(default)s)")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    runs = harness.run([_job(options, method) for method in options.methods])
    rows = [_row(method, runs[method]) for method in options.methods]
    base = next((row["ttft_seconds"] for row in rows if row["method"] == MATCHED), None)
    for row in rows:
        row["ttft_over_post_prefill_percent"] = round(100 * (row["ttft_seconds"] / base - 1), 2) if base else None
    title = f"{options.model}, {options.prompt_tokens:,} tokens, kept {options.kept_tokens:,}"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows))


def _job(options: argparse.Namespace, method: str) -> Job:
    return measurement_job(method, options, method, new_tokens=max(2, options.new_tokens))


def _row(method: str, runs: list[dict[str, Any]]) -> Row:
    ttft, spread = summary(runs, "ttft_seconds")
    return {
        "method": method,
        "ttft_seconds": round(ttft, 3),
        "ttft_spread_seconds": round(spread, 3),
        "compress_share_percent": round(100 * summary(runs, "compress_share")[0], 2),
        "decode_tokens_per_second": round(summary(runs, "decode_tokens_per_second")[0], 2),
        "decode_spread": round(summary(runs, "decode_tokens_per_second")[1], 2),
        "transient_mib": mib(summary(runs, "transient_bytes")[0]),
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    labels = [row["method"] for row in rows]
    bars(left, labels, [row["ttft_seconds"] for row in rows], "Time to first token", "s")
    bars(right, labels, [row["decode_tokens_per_second"] for row in rows], "Decode", "token/s")
