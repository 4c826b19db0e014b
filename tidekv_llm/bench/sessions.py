"""Document sessions: what the second question costs, next to the first and to a full prefill of the same prompt.

Every store is measured in processes of its own: open a document, ask three questions, then ask the third one of the
engine without a session. The answers of exact stores must be the same.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import count, names
from tidekv_llm.bench.harness import Harness, Job, Report, Row, add_common_arguments, bars, mib, summary

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
    """The options of the benchmark."""
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id or folder (default: %(default)s)")
    parser.add_argument("--document-tokens", type=count, default=8000, help="its size (default: %(default)s)")
    parser.add_argument("--kept-tokens", type=count, default=1024, help="KV positions per layer (default: %(default)s)")
    parser.add_argument("--chunk-size", type=count, default=2048, help="tokens per step (default: %(default)s)")
    parser.add_argument("--stores", type=names(STORES), default=list(STORES), help=f"of {', '.join(STORES)}")
    add_common_arguments(parser, rounds=1)


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    runs = harness.run([_job(options, store) for store in options.stores])
    rows = [_row(store, runs[store]) for store in options.stores]
    title = (
        f"{options.model}, document of {rows[0]['document_tokens']:,} tokens: seconds to the first token; the second "
        f"question should stay within {TARGET:.0%} of the first"
    )
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows))


def _job(options: argparse.Namespace, store: str) -> Job:
    fields = ("model", "document_tokens", "kept_tokens", "chunk_size")
    return Job(store, "sessions:measure", {"store": store, **{name: getattr(options, name) for name in fields}})


def measure(*, store: str, model: str, document_tokens: int, kept_tokens: int, chunk_size: int) -> dict[str, Any]:
    """The child's work: one store."""
    from tidekv_llm.config import PrefillConfig
    from tidekv_llm.documents import Document
    from tidekv_llm.engine import TideKV

    config = PrefillConfig(kept_tokens=kept_tokens, chunk_size=chunk_size)
    with tempfile.TemporaryDirectory() as folder, TideKV.from_pretrained(model, prefill=config) as llm:
        os.environ["TIDEKV_CACHE"] = folder  # the model is loaded: only the session goes there
        llm.context_window = max(llm.context_window, document_tokens + 500)
        llm.ask(Document.from_pages([_WARM_UP], "warm-up", ["1"]), "Why?", max_new_tokens=2)
        document = _document(llm, document_tokens)
        kind = {"store": "disk", "name": "bench"} if store == "disk" else {"int8": store == "int8"}
        with llm.open(document, **kind) as session:
            answers = [session.ask(question, remember=False, max_new_tokens=16) for question in QUESTIONS]
            stored = {"store_bytes": session.store_bytes, "document_tokens": session.document_tokens}
        again = llm.ask(document, QUESTIONS[-1], max_new_tokens=16)
    return {**stored, **_figures(answers, again)}


def _document(llm: TideKV, length: int) -> Document:
    """Real text of about this many tokens."""
    from tidekv_llm.bench.corpus import corpus_prompt
    from tidekv_llm.documents import Document

    assert llm.tokenizer is not None
    decoded = llm.tokenizer.decode(corpus_prompt(llm.tokenizer, length))
    return Document.from_pages([str(decoded)], "corpus.txt", ["1"])


def _figures(answers: Sequence[Answer], again: Answer) -> dict[str, Any]:
    first, second, third = (answer.metrics for answer in answers)
    return {
        "first_ttft_seconds": first.ttft_seconds,
        "second_ttft_seconds": second.ttft_seconds,
        "third_ttft_seconds": third.ttft_seconds,
        "again_ttft_seconds": again.metrics.ttft_seconds,
        "reused_prefix_tokens": third.reused_prefix_tokens,
        "first_peak_bytes": first.construction_peak_bytes,
        "second_peak_bytes": second.construction_peak_bytes,
        "again_peak_bytes": again.metrics.construction_peak_bytes,
        "same_answer": answers[-1].text == again.text,
        "notes": sorted({note for answer in answers for note in answer.metrics.notes}),
    }


def _row(store: str, runs: Sequence[dict[str, Any]]) -> Row:
    first, second, third, again = (
        summary(runs, f"{name}_ttft_seconds")[0] for name in ("first", "second", "third", "again")
    )
    return {
        "store": store,
        "document_tokens": runs[0]["document_tokens"],
        "first_seconds": round(first, 3),
        "second_seconds": round(second, 3),
        "second_over_first_percent": round(100 * second / first, 2),
        "third_seconds": round(third, 3),
        "third_without_session_seconds": round(again, 3),
        "third_over_it_percent": round(100 * third / again, 2),
        "same_answer": all(run["same_answer"] for run in runs),
        "store_mib": mib(runs[0]["store_bytes"]),
        "first_peak_mib": mib(summary(runs, "first_peak_bytes")[0]),
        "second_peak_mib": mib(summary(runs, "second_peak_bytes")[0]),
    }


def _plot(figure: Any, rows: list[Row]) -> None:
    left, right = figure.subplots(1, 2)
    labels = [row["store"] for row in rows]
    bars(left, labels, [row["second_over_first_percent"] for row in rows], "Second question over first", "%")
    bars(right, labels, [row["store_mib"] for row in rows], "Store", "MiB")
