"""``tidekv plan``: before a model is loaded, what each schedule would need and whether it fits."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import chunk_size, count, whole_number
from tidekv_llm.cli.terminal import print_json, print_table
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ConfigError

if TYPE_CHECKING:
    from tidekv_llm.planner import PlanRow

# The components that decide; --json has all of them.
COLUMNS = {"compressed_cache": "cache", "active_kv": "layer KV", "bridge": "bridge", "activations": "act."}


def add_command(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    summary = "predict memory from a model's config alone, and say what fits"
    parser = commands.add_parser("plan", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="alias, random:llama-3.1-8b, random:mistral-7b, config.json, folder or hub id (default: %(default)s)",
    )
    parser.add_argument("--layers", type=count, help="another number of layers than the config's")
    parser.add_argument("--context", type=count, default=131072, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--device-memory", metavar="SIZE", help="such as 24GiB: says what fits and how far it goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="kind (default: %(default)s)")
    parser.add_argument("--batch", type=count, default=1, help="prompts at once (default: %(default)s)")
    parser.add_argument(
        "--kept-tokens", type=whole_number, default=4096, help="KV positions a layer (default: %(default)s)"
    )
    parser.add_argument("--chunk-size", type=chunk_size, default=2048, help="or auto (default: %(default)s)")
    parser.add_argument("--bridge", choices=("device", "host"), default="device", help="default: %(default)s")
    parser.add_argument("--mlp-chunk-size", type=whole_number, default=0, help="split the MLP further (default: no)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache (default: %(default)s)")
    parser.add_argument("--compute-dtype", help="of the layer at work (default: the same)")
    parser.add_argument("--weight-bits", type=count, default=16, help="16, 8 or 4 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Predict and print."""
    from tidekv_llm.costs.plan import Plan
    from tidekv_llm.models.shapes import find_config, shape_of_config
    from tidekv_llm.planner import LEAST_MEMORY, PROMPT_LIMIT, plan_table
    from tidekv_llm.sizes import parse_bytes

    if options.context > PROMPT_LIMIT:
        raise ConfigError(f"--context={options.context} must be at most {PROMPT_LIMIT:,} tokens")
    memory = parse_bytes(options.device_memory, least=LEAST_MEMORY) if options.device_memory is not None else None
    config = PrefillConfig(
        chunk_size=options.chunk_size,
        kept_tokens=options.kept_tokens,
        bridge=options.bridge,
        mlp_chunk_size=options.mlp_chunk_size,
    )
    shape = shape_of_config(
        find_config(options.model, layers=options.layers),
        dtype=options.dtype,
        compute_dtype=options.compute_dtype,
        weight_bits=options.weight_bits,
    )
    plan = Plan(shape, options.context, config, batch=options.batch, device=options.device)
    rows = plan_table(plan, memory)
    if options.json:
        print_json([row.as_dict() for row in rows])
    else:
        _show(rows, options)
        if shape.max_positions and options.context > shape.max_positions:
            print(f"note: the model was trained for {shape.max_positions:,} tokens; this is about memory only")
    return 0


def _show(rows: list[PlanRow], options: argparse.Namespace) -> None:
    weights = rows[0].prediction.components["weights"] / 2**30
    title = f"{options.model}: {options.context:,} tokens, batch {options.batch}, kept {options.kept_tokens:,}; in GiB"
    headings = ("schedule", "peak", "transient", *COLUMNS.values(), "host", "fits", "longest", "chunk")
    cells = [_cells(row) for row in rows]
    print_table(cells, headings, right=range(1, len(headings)), title=f"{title}, weights {weights:.2f}")


def _cells(row: PlanRow) -> list[str]:
    from tidekv_llm.planner import PROMPT_LIMIT

    prediction = row.prediction
    sizes = [prediction.peak_allocated_bytes, prediction.transient_bytes]
    sizes += [prediction.components[name] for name in COLUMNS]
    longest = "" if row.longest_prompt is None else f"{row.longest_prompt:,}"
    return [
        prediction.schedule,
        *(f"{size / 2**30:.2f}" for size in (*sizes, prediction.host_bytes)),
        {None: "", True: "yes", False: "no"}[row.fits],
        "any" if row.longest_prompt == PROMPT_LIMIT else longest,
        str(row.recommended_chunk_size or ""),
    ]
