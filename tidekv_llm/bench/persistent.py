"""One process, many requests of mixed length: memory must not grow with history (Table 5b)."""

from __future__ import annotations

import argparse
from typing import Any

from tidekv_llm.arguments import count, counts, names
from tidekv_llm.bench.harness import Harness, Job, Report, Row, add_common_arguments, add_model_arguments, mib
from tidekv_llm.errors import ConfigError
from tidekv_llm.schedules import schedule_names

CYCLE = (256, 1536, 512, 3072, 1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser, rounds=None)
    parser.add_argument("--requests", type=count, default=150, help="requests (default: %(default)s)")
    parser.add_argument("--cycle", type=counts, default=list(CYCLE), help="prompt lengths, over and over")
    parser.add_argument("--new-tokens", type=count, default=4, help="tokens per answer (default: %(default)s)")
    methods = ["tidekv", "post-prefill"]
    parser.add_argument("--methods", type=names(schedule_names()), default=methods, help="default: both")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    least = 3 * len(options.cycle)
    if options.requests < least:
        raise ConfigError(f"--requests={options.requests} must be at least {least}: two cycles warm up")
    runs = harness.run([_job(options, method) for method in options.methods])
    rows = [_row(method, trace(runs[method][0]), runs[method][0]) for method in options.methods]
    title = f"{options.model}, {options.requests} requests of {', '.join(map(str, options.cycle))} tokens"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, runs))


def _job(options: argparse.Namespace, method: str) -> Job:
    arguments = {
        "method": method,
        "model": options.model,
        "layers": options.layers,
        "kept_tokens": options.kept_tokens,
        "chunk_size": options.chunk_size,
        "requests": options.requests,
        "cycle": options.cycle,
        "new_tokens": options.new_tokens,
    }
    return Job(method, "persistent:serve", arguments)


def serve(
    *,
    method: str,
    model: str,
    layers: int | None,
    kept_tokens: int,
    chunk_size: int,
    requests: int,
    cycle: list[int],
    new_tokens: int,
) -> dict[str, Any]:
    """The child's work: resident (CUDA: reserved) bytes after every request, and each request's peak."""
    from tidekv_llm.bench.models import make_prompt, open_model
    from tidekv_llm.config import PrefillConfig

    config = PrefillConfig(kept_tokens=kept_tokens, chunk_size=chunk_size, schedule=method)
    with open_model(model, config=config, needed_tokens=max(cycle) + new_tokens, layers=layers) as llm:
        prompts = [make_prompt(llm, length) for length in cycle]
        return {"cycle": len(cycle), **serve_requests(llm, prompts, requests, new_tokens)}


def serve_requests(llm: Any, prompts: list[list[int]], requests: int, new_tokens: int) -> dict[str, Any]:
    """Run the requests on an engine; the figures per request, in order."""
    import numpy as np

    # Their memory is taken, and touched, before the first request: the figures must not be what grows.
    after, peaks = np.full(requests, -1), np.full(requests, -1)
    for number in range(requests):
        metrics = llm.generate(
            prompts[number % len(prompts)], max_new_tokens=new_tokens, ignore_eos=True, drafts=0
        ).metrics
        peaks[number] = metrics.construction_peak_bytes
        after[number] = _held_bytes()
    return {"after_bytes": after.tolist(), "peak_bytes": peaks.tolist()}


def _held_bytes() -> int:
    """What the process keeps: reserved on CUDA; on a CPU resident, once malloc's free pages are given back."""
    import torch

    from tidekv_llm.bench.measure import tidy_heap

    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    import psutil

    tidy_heap()
    return int(psutil.Process().memory_info().rss)


def trace(run: dict[str, Any]) -> dict[str, float]:
    """Slope after warm-up (bytes per request, least squares) with its standard error, and first-to-last change.

    The first two cycles are the warm-up. The change is the mean of the last cycle minus the mean of the third.
    """
    import numpy as np

    cycle, values = run["cycle"], np.array(run["after_bytes"], dtype=float)
    warm = values[2 * cycle :]
    index = np.arange(len(warm), dtype=float)
    centred = index - index.mean()
    slope = float((centred * warm).sum() / (centred**2).sum())
    residual = warm - warm.mean() - slope * centred
    error = float(np.sqrt((residual**2).sum() / max(1, len(warm) - 2) / (centred**2).sum()))
    change = float(warm[-cycle:].mean() - warm[:cycle].mean())
    return {"slope": slope, "slope_error": error, "change": change}


def _row(method: str, found: dict[str, float], run: dict[str, Any]) -> Row:
    return {
        "method": method,
        "requests": len(run["after_bytes"]),
        "slope_kib_per_request": round(found["slope"] / 1024, 3),
        "slope_error_kib": round(found["slope_error"] / 1024, 3),
        "first_to_last_cycle_mib": mib(found["change"]),
        "highest_peak_mib": mib(max(run["peak_bytes"])),
        "held_after_mib": mib(run["after_bytes"][-1]),
    }


def _plot(figure: Any, runs: dict[str, list[dict[str, Any]]]) -> None:
    axes = figure.subplots()
    for method, own in runs.items():
        axes.plot([size / 2**20 for size in own[0]["after_bytes"]], label=method)
    axes.set(xlabel="request", ylabel="held after it, MiB", title="Memory over many requests")
    axes.legend()
    axes.grid(alpha=0.3)
