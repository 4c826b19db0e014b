"""``tidekv bench NAME``: a benchmark's module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import re
from typing import TYPE_CHECKING, Any

from tidekv_llm.bench import BENCHMARKS
from tidekv_llm.cli.terminal import Bars, literal, print_json, print_table

if TYPE_CHECKING:
    from types import ModuleType

    from tidekv_llm.bench.harness import Report


def add_command(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine",
        description="Measure this machine.",
        epilog="\n".join(f"{name:<12}{summary}" for name, summary in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=tuple(BENCHMARKS), metavar="BENCHMARK", help="one of those below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options; try BENCHMARK --help")
    parser.set_defaults(run=lambda options: _run(options.benchmark, options.rest, type(parser)))


def benchmark(name: str, parser_class: type[argparse.ArgumentParser]) -> tuple[ModuleType, argparse.ArgumentParser]:
    """A benchmark's module and the parser of its options."""
    module = importlib.import_module(f"tidekv_llm.bench.{name.replace('-', '_')}")
    parser = parser_class(prog=f"tidekv bench {name}", description=_plain(module.__doc__))
    module.add_arguments(parser)
    return module, parser


def _run(name: str, arguments: list[str], parser_class: type[argparse.ArgumentParser]) -> int:
    from tidekv_llm.bench.harness import Harness

    module, parser = benchmark(name, parser_class)
    options = parser.parse_args(arguments)
    with Bars(hidden=options.json, remaining=True) as bars:
        report = module.run(Harness(name, options, lambda fraction, doing: bars.show(name, fraction, doing)))
    if options.json:
        print_json(report.result)
    else:
        _show(report)
    return 0


def _show(report: Report) -> None:
    rows = [[_cell(row.get(heading)) for heading in report.columns] for row in report.rows]
    headings = [heading.replace("_", " ") for heading in report.columns]
    print_table(rows, headings, right=range(1, len(headings)), title=report.title)
    print(literal(f"\nwritten: {', '.join(map(str, report.paths))}{report.note}"))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return str(value)


def _plain(docstring: str | None) -> str:
    """A docstring without its markup: ``name`` and :func:`name` become name."""
    return re.sub(r"(:[a-z:]+:)?`+~?([^`]+)`+", r"\2", docstring or "")
