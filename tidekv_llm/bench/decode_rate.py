"""Decode rate of the cache's layouts and precisions at the same total of kept positions."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
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
    rows = [_row(name, figures) for name, figures in found.items()]
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
    """Bytes of each variant's cache, and tokens per second of every repeat."""
    caches = {
        name: llm.with_prefill(**options).prefill(prompt, reserve=new_tokens + 1).cache
        for name, options in VARIANTS.items()
    }
    found: dict[str, Any] = {name: {"cache_bytes": cache.nbytes, "rates": []} for name, cache in caches.items()}
    for _ in range(repeats):
        for name, cache in caches.items():
            found[name]["rates"].append(_rate(llm, cache, new_tokens))
    return found


def _rate(llm: TideKV, cache: CompressedCache, new_tokens: int) -> float:
    import torch

    from tidekv_llm.decode.loop import DecodeAdapter

    adapter, token = (
        DecodeAdapter(llm.decoder, cache, llm.decoder.attention("auto")),
        torch.tensor([[5]], device=llm.device),
    )
    adapter.step(token).sum().item()
    begin = time.perf_counter()
    for _ in range(new_tokens):
        logits = adapter.step(token)
    logits.sum().item()  # waits for a GPU
    rate = new_tokens / (time.perf_counter() - begin)
    for layer in cache.layers:
        layer.reset()
    return rate


def _row(name: str, figures: dict[str, Any]) -> Row:
    rates = figures["rates"]
    return {
        "cache": name,
        "cache_mib": mib(figures["cache_bytes"]),
        "decode_tokens_per_second": round(median(rates), 2),
        "spread": round(max(rates) - min(rates), 2),
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    labels = [row["cache"] for row in rows]
    bars(left, labels, [row["decode_tokens_per_second"] for row in rows], "Decode", "token/s")
    bars(right, labels, [row["cache_mib"] for row in rows], "Cache", "MiB")
