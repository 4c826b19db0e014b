"""``tidekv plan`` and ``tidekv bench ...``: one module per command, found by name.

A benchmark is a module of this package with ``HELP``, ``add_arguments(parser)`` and ``run(options) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from typing import Any

BENCHMARKS = (
    "headline",
    "fidelity",
    "memory",
    "latency",
    "chunks",
    "persistent",
    "capacity",
    "selectors",
    "sessions",
)


def add_commands(commands: Any) -> None:
    """Add both commands to the command line's subparsers."""
    from tidekv_llm.bench import plan

    _add(commands, "plan", plan)
    bench = commands.add_parser("bench", help="measure this machine", description="Measure this machine.")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK", parser_class=type(bench))
    for name in BENCHMARKS:
        full_name = f"{__package__}.{name}"
        if importlib.util.find_spec(full_name) is not None:
            module = importlib.import_module(full_name)
            if hasattr(module, "add_arguments"):
                _add(kinds, name, module)


def _add(commands: Any, name: str, module: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=module.HELP, description=module.__doc__)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
