"""``tidekv plan`` and ``tidekv bench NAME``: one module per benchmark, imported only when it is asked for.

A benchmark is a module of this package with ``add_arguments(parser)`` and ``run(options) -> int``, and a line in
:data:`BENCHMARKS`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
from typing import Any

from tidekv_llm.bench import plan

BENCHMARKS = {
    "headline": "the README's table: transient, time to first token, fidelity, decode rate",
    "fidelity": "hidden states and next tokens against the whole forward (Table 8, Fig. 6)",
    "memory": "construction memory over prompt length (Fig. 5, Tables 5a and 6)",
    "latency": "time to first token and decode rate of the schedules (Tables 9 and 10)",
    "chunks": "chunk sizes: time to first token against memory (Table 11)",
    "persistent": "no growth over many requests in one process (Table 5b)",
    "capacity": "the longest prompt under a memory limit (Table 6)",
    "selectors": "who stays: selectors and budgets against each other",
    "sessions": "many questions about one document",
}


def add_commands(commands: Any) -> None:
    """Add both commands to the command line's subparsers."""
    planner = commands.add_parser("plan", help=plan.HELP, description=f"{plan.HELP[0].upper()}{plan.HELP[1:]}.")
    plan.add_arguments(planner)
    planner.set_defaults(run=plan.run)
    bench = commands.add_parser(
        "bench",
        help="measure this machine",
        description="Measure this machine.",
        epilog="\n".join(f"{name:<12}{summary}" for name, summary in available().items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("benchmark", choices=tuple(available()), metavar="BENCHMARK", help="one of those below")
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options; try BENCHMARK --help")
    bench.set_defaults(run=lambda options: _run(options, type(bench)))


def available() -> dict[str, str]:
    """Benchmarks that are installed, with what they do."""
    found = {}
    for name, summary in BENCHMARKS.items():
        if importlib.util.find_spec(f"tidekv_llm.bench.{name}") is not None:
            found[name] = summary
    return found


def _run(options: argparse.Namespace, parser_class: type[argparse.ArgumentParser]) -> int:
    module = importlib.import_module(f"tidekv_llm.bench.{options.benchmark}")
    parser = parser_class(prog=f"tidekv bench {options.benchmark}", description=_plain(module.__doc__))
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(options.rest))
    return code


def _plain(docstring: str | None) -> str:
    """A docstring without its markup: ``name`` and :func:`name` become name."""
    return re.sub(r"(:[a-z:]+:)?`+~?([^`]+)`+", r"\2", docstring or "")
