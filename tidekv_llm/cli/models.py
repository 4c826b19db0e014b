"""``tidekv models``: the aliases, and where their weights are."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from tidekv_llm.cli.terminal import literal, print_json
from tidekv_llm.sizes import format_bytes


def add_command(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    summary = "list model aliases and where they are cached"
    parser = commands.add_parser("models", help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the list."""
    from tidekv_llm.models import list_models

    models = list_models()
    if options.json:
        print_json([{**asdict(model), "path": str(model.path)} for model in models])
        return 0
    for model in models:
        state = f"{format_bytes(model.bytes)} in" if model.cached else f"a download of {format_bytes(model.bytes)}, to"
        print(literal(f"{model.alias}: {model.description}\n  {state} {model.path}"))
    print("\nAny Hugging Face id, folder with safetensors or GGUF file works too.")
    return 0
