"""Construction memory over prompt length (Fig. 5, Tables 5a and 6): every schedule on the same model and prompt.

The transient is the peak minus the steady state after it; growth is the peak minus what was there before.
"""

from __future__ import annotations

import argparse
from typing import Any

from tidekv_llm.arguments import counts, names
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
from tidekv_llm.bench.task import HF_ONE_SHOT
from tidekv_llm.schedules import schedule_names

MATCHED = "post-prefill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser, rounds=1)
    allowed = (HF_ONE_SHOT, *schedule_names())
    parser.add_argument("--lengths", type=counts, default=[4096, 8192, 16384], help="default: 4096,8192,16384")
    parser.add_argument("--methods", type=names(allowed), default=[MATCHED, "tidekv"], help=f"of {', '.join(allowed)}")
    parser.add_argument("--bridge", choices=("device", "host"), default="device", help="default: %(default)s")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    jobs = [_job(options, method, length) for length in options.lengths for method in options.methods]
    runs = harness.run(jobs)
    rows = [
        _row(method, length, runs[_label(method, length)]) for length in options.lengths for method in options.methods
    ]
    _add_reductions(rows)
    title = f"{options.model}, kept {options.kept_tokens:,}, chunk {options.chunk_size:,}"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows))


def _label(method: str, length: int) -> str:
    return f"{method} at {length}"


def _job(options: argparse.Namespace, method: str, length: int) -> Job:
    new_tokens = 1 if method != HF_ONE_SHOT else 2
    return measurement_job(
        _label(method, length), options, method, prompt_tokens=length, new_tokens=new_tokens, bridge=options.bridge
    )


def _row(method: str, length: int, runs: list[dict[str, Any]]) -> Row:
    transient, spread = summary(runs, "above_steady_bytes")
    return {
        "method": method,
        "prompt_tokens": length,
        "transient_mib": mib(transient),
        "spread_mib": mib(spread),
        "growth_mib": mib(summary(runs, "transient_bytes")[0]),
        "peak_mib": mib(summary(runs, "peak_bytes")[0]),
        "cache_mib": mib(summary(runs, "cache_bytes")[0]),
        "components": runs[0]["components"],
    }


def _add_reductions(rows: list[Row]) -> None:
    """How much lower than the matched post-prefill control at the same length, in percent."""
    base = {row["prompt_tokens"]: row["transient_mib"] for row in rows if row["method"] == MATCHED}
    for row in rows:
        matched = base.get(row["prompt_tokens"])
        row["below_post_prefill_percent"] = (
            None if not matched or row["method"] == MATCHED else round(100 * (1 - row["transient_mib"] / matched), 1)
        )


def _plot(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        axes.plot([r["prompt_tokens"] for r in own], [r["transient_mib"] for r in own], marker="o", label=method)
    axes.set(xlabel="prompt tokens", ylabel="transient, MiB", title="Memory to build the cache")
    axes.legend()
    axes.grid(alpha=0.3)
