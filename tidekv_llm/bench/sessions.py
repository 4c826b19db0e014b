"""Document sessions: what the second question costs, next to the first and to a full prefill of the same prompt.

Every store is measured in a process of its own: open a document, ask three questions, then ask the third one of the
engine without a session. The answers of exact stores must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidekv_llm.bench.harness import count
from tidekv_llm.errors import TideKVError

if TYPE_CHECKING:
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import Answer, TideKV

STORES = ("memory", "disk", "int8")
QUESTIONS = (
    "What does the continue statement do?",
    "How are exceptions raised again?",
    "What is the difference between a list and a tuple?",
)
TARGET = 0.05
_WARM_UP = "Reading a short text first keeps the costs of first calls out of the figures. " * 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tidekv bench sessions``."""
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id or folder (default: %(default)s)")
    parser.add_argument("--document-tokens", type=count, default=8000, help="its size (default: %(default)s)")
    parser.add_argument("--kept-tokens", type=count, default=1024, help="KV positions per layer (default: %(default)s)")
    parser.add_argument("--chunk-size", type=count, default=2048, help="tokens per step (default: %(default)s)")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES), help="which stores")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    results = [_in_process(options, store) for store in options.stores]
    if options.json:
        print(json.dumps(results))
    else:
        _show(results)
    return 0


def measure(options: argparse.Namespace, store: str) -> dict[str, Any]:
    """Measure one store in this process."""
    from tidekv_llm.config import PrefillConfig
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import TideKV

    config = PrefillConfig(kept_tokens=options.kept_tokens, chunk_size=options.chunk_size)
    with (
        tempfile.TemporaryDirectory() as folder,
        TideKV.from_pretrained(options.model, prefill=config) as llm,
    ):
        os.environ["TIDEKV_CACHE"] = folder  # the model is loaded: only the session goes there
        llm.context_window = max(llm.context_window, options.document_tokens + 500)
        llm.ask(Document.from_pages([_WARM_UP], "warm-up", ["1"]), "Why?", max_new_tokens=2)
        document = _document(llm, options.document_tokens)
        kind = {"store": "disk", "name": "bench"} if store == "disk" else {"int8": store == "int8"}
        with llm.open(document, **kind) as session:
            answers = [session.ask(question, remember=False, max_new_tokens=16) for question in QUESTIONS]
            store_bytes, tokens = session.store_bytes, session.document_tokens
        again = llm.ask(document, QUESTIONS[-1], max_new_tokens=16)
    return _figures(store, tokens, store_bytes, answers, again)


def _document(llm: TideKV, length: int) -> Document:
    """Real text of about this many tokens."""
    from tidekv_llm.bench.corpus import corpus_prompt
    from tidekv_llm.documents import Document

    assert llm.tokenizer is not None
    decoded = llm.tokenizer.decode(corpus_prompt(llm.tokenizer, length))
    return Document.from_pages([str(decoded)], "corpus.txt", ["1"])


def _figures(store: str, tokens: int, store_bytes: int, answers: Sequence[Answer], again: Answer) -> dict[str, Any]:
    first, second, third = (answer.metrics for answer in answers)
    return {
        "store": store,
        "document_tokens": tokens,
        "store_bytes": store_bytes,
        "first_ttft_seconds": first.ttft_seconds,
        "second_ttft_seconds": second.ttft_seconds,
        "third_ttft_seconds": third.ttft_seconds,
        "again_ttft_seconds": again.metrics.ttft_seconds,
        "second_to_first": second.ttft_seconds / first.ttft_seconds,
        "third_to_again": third.ttft_seconds / again.metrics.ttft_seconds,
        "reused_prefix_tokens": third.reused_prefix_tokens,
        "first_peak_bytes": first.construction_peak_bytes,
        "second_peak_bytes": second.construction_peak_bytes,
        "again_peak_bytes": again.metrics.construction_peak_bytes,
        "same_answer": answers[-1].text == again.text,
        "notes": sorted({note for answer in answers for note in answer.metrics.notes}),
    }


def _in_process(options: argparse.Namespace, store: str) -> dict[str, Any]:
    """Measure in a fresh process, so that no store finds another one's heap."""
    settings = json.dumps({**_settings(options), "store": store})
    command = [sys.executable, "-m", "tidekv_llm.bench.sessions", "--child", settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise TideKVError(f"the {store} store was not measured: {lines[-1] if lines else done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("model", "document_tokens", "kept_tokens", "chunk_size")}


def _show(results: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tidekv_llm.sizes import format_bytes

    table = Table(title=f"Document of {results[0]['document_tokens']:,} tokens", box=None, pad_edge=False)
    for heading in ("store", "first", "second", "ratio", "prefill again", "ratio", "store", "peaks 1st, 2nd", "same"):
        table.add_column(heading, justify="left" if heading == "store" else "right")
    for one in results:
        table.add_row(
            one["store"],
            f"{one['first_ttft_seconds']:.2f} s",
            f"{one['second_ttft_seconds']:.2f} s",
            f"{one['second_to_first']:.1%}",
            f"{one['again_ttft_seconds']:.2f} s",
            f"{one['third_to_again']:.1%}",
            format_bytes(one["store_bytes"]),
            f"{format_bytes(one['first_peak_bytes'])}, {format_bytes(one['second_peak_bytes'])}",
            "yes" if one["same_answer"] else "no",
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    console.print(
        f"[dim]Times to the first token; the second question should stay within {TARGET:.0%} of the first. "
        '"Prefill again" is the third question without a session; "same": its answer is the same text.[/dim]'
    )


def main(arguments: Sequence[str]) -> int:
    """``python -m tidekv_llm.bench.sessions``."""
    if arguments[:1] == ["--child"]:
        settings = json.loads(arguments[1])
        print(json.dumps(measure(argparse.Namespace(**settings), settings["store"])))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
