"""Decode rate at the same number of positions: transformers' and ours, every layout, several answers at once."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import count
from tidekv_llm.bench.harness import (
    Harness,
    Job,
    Report,
    Row,
    add_common_arguments,
    add_model_arguments,
    bars,
    mib,
    model_fields,
)

if TYPE_CHECKING:
    from tidekv_llm.cache.compressed import CompressedCache
    from tidekv_llm.engine import TideKV

VARIANTS: dict[str, dict[str, Any]] = {
    "rectangular": {"layout": "rectangular"},
    "flattened": {"layout": "flattened"},
    "ada": {"head_budget": "ada"},
    "8 bits": {"kv_bits": 8},
    "4 bits": {"kv_bits": 4},
    "2 bits": {"kv_bits": 2},
}
TRANSFORMERS = "transformers generate()"
TOGETHER = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser, prompt_tokens=2048)
    add_common_arguments(parser, rounds=None)
    parser.add_argument("--new-tokens", type=count, default=32, help="decoded from each cache (default: %(default)s)")
    parser.add_argument("--repeats", type=count, default=3, help="of all, in turn (default: %(default)s)")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    fields = {**model_fields(options), "new_tokens": options.new_tokens, "repeats": options.repeats}
    (found,) = harness.run([Job("all", "decode_rate:measure", fields)])["all"]
    baseline = found.get(TRANSFORMERS, {"rates": []})["rates"]
    rows = [_row(name, figures, baseline) for name, figures in found.items()]
    title = f"{options.model}, {options.prompt_tokens:,} tokens, kept {options.kept_tokens:,}, batch 1"
    return harness.finish(rows, runs=found, title=title, plot=lambda figure: _plot(figure, rows))


def measure(
    *,
    model: str,
    layers: int | None,
    prompt_tokens: int,
    kept_tokens: int,
    chunk_size: int,
    new_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """The child's work: every variant, taking turns, since a machine's clock rate drifts."""
    from tidekv_llm.bench.models import make_prompt, open_model
    from tidekv_llm.config import PrefillConfig

    config = PrefillConfig(kept_tokens=kept_tokens, chunk_size=chunk_size)
    with open_model(model, config=config, needed_tokens=prompt_tokens + new_tokens + 1, layers=layers) as llm:
        return decode_rates(llm, make_prompt(llm, prompt_tokens), new_tokens=new_tokens, repeats=repeats)


def decode_rates(llm: TideKV, prompt: Sequence[int], *, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Bytes of each way's cache, and tokens per second of every repeat, each from the median time of a step."""
    ways = _ways(llm, list(prompt), new_tokens)
    found: dict[str, Any] = {name: {"cache_bytes": nbytes, "rates": []} for name, (nbytes, _) in ways.items()}
    for _ in range(repeats):
        for name, (_, rate) in ways.items():
            found[name]["rates"].append(rate())
    return found


def _ways(llm: TideKV, prompt: list[int], new_tokens: int) -> dict[str, tuple[int, Callable[[], float]]]:
    """Bytes of the cache and what measures it, by name."""
    from tidekv_llm.decode.loop import LayerByLayer

    reserve = new_tokens + 2
    caches = {
        name: llm.with_prefill(**options).prefill(prompt, reserve=reserve).cache for name, options in VARIANTS.items()
    }
    plain, shown = llm.steps, llm.config.kept_tokens
    several = [llm.with_prefill().prefill(prompt, reserve=reserve).cache for _ in range(TOGETHER)]
    first = caches["rectangular"]
    ways: dict[str, tuple[int, Callable[[], float]]] = {
        TRANSFORMERS: (
            llm.shape.num_layers * llm.shape.kv_bytes(shown),
            lambda: _generate(llm, prompt[:shown], new_tokens),
        ),
        "the model's own layers": (first.nbytes, lambda: _rate(llm, LayerByLayer(llm.decoder), [first], new_tokens)),
    }
    for name, cache in caches.items():
        ways[name] = (cache.nbytes, functools.partial(_rate, llm, plain, [cache], new_tokens))
    at_once = functools.partial(_rate, llm, plain, several, new_tokens)
    ways[f"{TOGETHER} answers at once"] = (sum(cache.nbytes for cache in several), at_once)
    return ways


def _rate(llm: TideKV, steps: Any, caches: Sequence[CompressedCache], new_tokens: int) -> float:
    """Tokens per second of all answers together."""
    rows = [steps.row(cache, llm.decoder.attention("auto")) for cache in caches]
    times = []
    for _ in range(new_tokens + 1):
        logits = steps.step(rows, [[5]] * len(rows))
        logits.sum().item()  # waits for a GPU
        times.append(time.perf_counter())
    for cache in caches:
        for layer in cache.layers:
            layer.reset()
    return len(rows) / median(after - before for before, after in pairwise(times))


def _generate(llm: TideKV, prompt: list[int], new_tokens: int) -> float:
    from tidekv_llm.bench.measure import generate_times

    return 1 / median(after - before for before, after in pairwise(generate_times(llm, prompt, new_tokens + 2)[1:]))


def _row(name: str, figures: dict[str, Any], baseline: Sequence[float]) -> Row:
    rates = figures["rates"]
    ratios = [rate / base for rate, base in zip(rates, baseline, strict=False)]
    return {
        "way": name,
        "cache_mib": mib(figures["cache_bytes"]),
        "decode_tokens_per_second": round(median(rates), 2),
        "spread": round(max(rates) - min(rates), 2),
        "ratio": round(median(ratios), 2) if ratios else None,
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    labels = [row["way"] for row in rows]
    bars(left, labels, [row["decode_tokens_per_second"] for row in rows], "Decode", "token/s")
    bars(right, labels, [row["cache_mib"] for row in rows], "Cache", "MiB")
