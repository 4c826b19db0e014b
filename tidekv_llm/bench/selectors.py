"""Which selector settings find a needle: the table behind the defaults.

Every prompt is prefilled once; each setting then keeps its own part of the same full layers (``FanOut``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tidekv_llm.bench.needle import answers, make_needle
from tidekv_llm.config import PrefillConfig
from tidekv_llm.engine import TideKV

DEFAULTS = PrefillConfig()
# (window, pooling, kernel, weights): the rows of the table in the design notes, and their neighbours.
SNAPKV_GRID = (
    (32, "max", 7, "uniform"),
    (32, "avg", 7, "uniform"),
    (32, "avg", 5, "uniform"),
    (64, "avg", 5, "uniform"),
    (32, "none", 1, "uniform"),
    (16, "max", 7, "uniform"),
    (8, "max", 7, "uniform"),
    (16, "avg", 21, "uniform"),
    (8, "max", 21, "uniform"),
    (32, "max", 21, "uniform"),
    (32, "avg", 21, "uniform"),
    (32, "max", 41, "uniform"),
    (32, "max", 7, "recency"),
    (16, "max", 21, "recency"),
    (64, "max", 21, "recency"),
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"head_budget": "ada"},
    {"layer_budget": "pyramid"},
    {"layer_budget": "cake"},
    {"layer_budget": "pyramid", "head_budget": "ada"},
    {"kv_bits": 8},
    {"kv_bits": 4},
    {"kv_bits": 2},
    {"selector": "chunkkv"},
    {"selector": "chunkkv", "window_size": 32},
    {"selector": "keydiff"},
    {"selector": "h2o"},
    {"selector": "expected-attention"},
    {"selector": "recent"},
    {"selector": "random"},
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one setting found.

    Attributes:
        setting: options that differ from the defaults.
        kept_tokens: K.
        found: per depth, whether the number was in the answer.
        answers: per depth, the answer.
    """

    setting: dict[str, Any]
    kept_tokens: int
    found: tuple[bool, ...]
    answers: tuple[str, ...]


def settings() -> list[dict[str, Any]]:
    """The defaults first, then everything else that is compared."""
    grid = [
        {"window_size": window, "pooling": pooling, "kernel_size": kernel, "weights": weights}
        for window, pooling, kernel, weights in SNAPKV_GRID
    ]
    return [{}, *grid, *OTHERS]


def sweep(
    llm: TideKV,
    choices: Sequence[dict[str, Any]],
    *,
    prompt_tokens: int = 7000,
    kept_tokens: Iterable[int] = (512, 1024),
    depths: Sequence[float] = (0.1, 0.5, 0.9),
) -> list[Outcome]:
    """Run every setting with every budget on a needle at every depth."""
    cases = [(choice, kept) for kept in kept_tokens for choice in choices]
    configs = [DEFAULTS.replace(kept_tokens=kept, **choice) for choice, kept in cases]
    columns = []
    for depth in depths:
        needle = make_needle(llm, prompt_tokens, depth)
        columns.append([(text, needle.number in text) for text in answers(llm, needle.token_ids, configs)])
    return [
        Outcome(choice, kept, tuple(hit for _, hit in row), tuple(text for text, _ in row))
        for (choice, kept), row in zip(cases, zip(*columns, strict=True), strict=True)
    ]


def verdict(outcomes: Sequence[Outcome]) -> str:
    """One line: whether a SnapKV setting found more needles than the defaults did."""
    totals: dict[str, int] = {}
    for outcome in outcomes:
        if set(outcome.setting) <= {"window_size", "pooling", "kernel_size", "weights"}:
            name = describe(outcome.setting)
            totals[name] = totals.get(name, 0) + sum(outcome.found)
    ours, best = totals[describe({})], max(totals.values())
    asked = sum(len(outcome.found) for outcome in outcomes if not outcome.setting)
    if best == ours:
        return f"No SnapKV setting finds more needles than the defaults ({ours} of {asked})."
    better = ", ".join(name for name, total in totals.items() if total == best)
    return f"The defaults find {ours} of {asked}; better, with {best}: {better}."


def describe(setting: dict[str, Any]) -> str:
    """A setting in words: ``snapkv, W=16, max 21``, and what else differs from the defaults."""
    config = DEFAULTS.replace(**setting)
    name = str(config.selector)
    if name == "snapkv":
        pooling = config.pooling if config.pooling == "none" else f"{config.pooling} {config.kernel_size}"
        name += f", W={config.window_size}, {pooling}"
        name += "" if config.weights == "uniform" else f", {config.weights}"
    elif "window_size" in setting:
        name += f", W={config.window_size}"
    extras = [f"{key}={setting[key]}" for key in ("layer_budget", "head_budget", "kv_bits") if key in setting]
    return ", ".join([name, *extras])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tidekv bench selectors``."""
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id or folder (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=7000, help="haystack (default: %(default)s)")
    parser.add_argument("--kept-tokens", type=int, nargs="+", default=[512, 1024], help="budgets (default: 512 1024)")
    parser.add_argument(
        "--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="needle depths (default: 0.1 0.5 0.9)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Sweep and print a table, or JSON with every answer."""
    with TideKV.from_pretrained(options.model) as llm:
        outcomes = sweep(
            llm,
            settings(),
            prompt_tokens=options.prompt_tokens,
            kept_tokens=options.kept_tokens,
            depths=options.depths,
        )
    if options.json:
        rows = [
            {
                "setting": describe(each.setting),
                "kept_tokens": each.kept_tokens,
                "found": list(each.found),
                "answers": list(each.answers),
            }
            for each in outcomes
        ]
        print(json.dumps({"depths": options.depths, "rows": rows, "verdict": verdict(outcomes)}))
    else:
        _show(outcomes, options.kept_tokens)
    return 0


def _show(outcomes: Sequence[Outcome], kept_tokens: Sequence[int]) -> None:
    table = Table("setting", *(f"kept {kept:,}" for kept in kept_tokens), title="Needles found")
    for name in dict.fromkeys(describe(outcome.setting) for outcome in outcomes):
        mine = [outcome for outcome in outcomes if describe(outcome.setting) == name]
        table.add_row(name, *(f"{sum(outcome.found)} of {len(outcome.found)}" for outcome in mine))
    console = Console()
    console.print(table)
    console.print(verdict(outcomes))
