"""What the command line prints: progress on standard error, answers and tables on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    from tidekv_llm.doctor import Check
    from tidekv_llm.documents import Citation, Document
    from tidekv_llm.engine import Answer
    from tidekv_llm.metrics import Metrics
    from tidekv_llm.models import ModelInfo
    from tidekv_llm.prefixes.named import StoredSession
    from tidekv_llm.request import Progress as PrefillProgress

ORIGINS = {
    "model": "named by the model",
    "text": "words and numbers found on the page",
    "attention": "read most, by attention",
}


class AskConsole:
    """Progress and result of ``tidekv ask``.

    Args:
        as_json: print one JSON object and nothing else on standard output.
        quiet: no progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._out = Console(soft_wrap=True, highlight=False)
        error = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=error,
            transient=True,
            disable=quiet or as_json or not error.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._answer_begun = False

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def reading(self, path: str) -> Callable[[int, int], None]:
        """A callback for the pages of one file."""
        name = Path(path).name

        def report(done: int, total: int) -> None:
            self._advance(f"Reading {name}", done / max(total, 1), f"page {done} of {total}")

        return report

    def loading(self, message: str, fraction: float) -> None:
        """Progress of fetching the model."""
        self._advance("Model", fraction, message)

    def prefilling(self, progress: PrefillProgress) -> None:
        """Progress of the prefill."""
        detail = f"layer {progress.layer} of {progress.layers}, {progress.eta_seconds:.0f} s left"
        self._advance("Reading the prompt", progress.fraction, detail)

    def text(self, delta: str) -> None:
        """A piece of the answer, as it comes."""
        self._progress.stop()
        if not self._as_json:
            if not self._answer_begun:
                self._out.print()
                self._answer_begun = True
            self._out.print(escape(delta), end="")
            sys.stdout.flush()

    def show(self, answer: Answer, documents: Sequence[Document], model: str) -> None:
        """What follows the answer's text: citations, warnings and figures."""
        self._progress.stop()
        if self._as_json:
            print(json.dumps(answer_as_dict(answer, model), ensure_ascii=False))
            return
        self._out.print("" if self._answer_begun else "\n(the model gave an empty answer)")
        if answer.finish_reason == "length":
            self._out.print("[dim](cut at --max-new-tokens)[/dim]")
        self._out.print()
        several = len(documents) > 1
        for citation in answer.citations:
            self._out.print(_citation_line(citation, several))
        for warning in answer.warnings:
            self._out.print(f"[yellow]note:[/yellow] {escape(warning)}")
        _print_table(metrics_table(answer.metrics, model))
        for note in answer.metrics.notes:
            self._out.print(f"[dim]{escape(note)}[/dim]")

    def _advance(self, stage: str, fraction: float, detail: str) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=1.0, detail="")
        self._progress.update(self._tasks[stage], completed=fraction, detail=detail)


def _citation_line(citation: Citation, several: bool) -> str:
    name = f"{citation.document_name} " if several else ""
    marker = escape(f"[{name}p. {citation.label}]")
    origin = ORIGINS[citation.origin]
    if citation.origin == "model" and not citation.verified:
        origin += ", not verified on the page"
    quote = f"  {escape(citation.quote)}" if citation.quote else ""
    return f"[bold]{marker}[/bold]{quote} [dim]({origin})[/dim]"


def metrics_table(metrics: Metrics, model: str) -> Table:
    """The figures of one answer: two columns, with units."""
    components = metrics.components
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    share = metrics.kept_tokens / max(metrics.prompt_tokens, 1)
    rows = [("prompt", f"{metrics.prompt_tokens:,} tokens", f"{model}, chunks of {metrics.chunk_size:,}")]
    if metrics.reused_prefix_tokens:
        reused = metrics.reused_prefix_tokens / max(metrics.prompt_tokens, 1)
        rows.append(("reused", f"{metrics.reused_prefix_tokens:,} tokens", f"{reused:.1%} of the prompt, read before"))
    rows += [
        ("time to first token", f"{metrics.ttft_seconds:.2f} s", f"compression {metrics.compress_seconds:.2f} s"),
        ("construction peak", format_bytes(metrics.construction_peak_bytes), "until the first token, of which"),
    ]
    names = {
        "weights": "weights",
        "active_kv": "full KV, one layer",
        "bridge": "hidden states",
        "activations": "activations",
        "temporary": "scratch buffers",
        "compressed_cache": "compressed cache",
        "document_store": "document store",
    }
    parts = [(label, components.get(key, 0)) for key, label in names.items()]
    parts.append(("Python, libraries", metrics.construction_peak_bytes - sum(nbytes for _, nbytes in parts)))
    rows += [(f"  {label}", format_bytes(nbytes), "") for label, nbytes in parts if nbytes > 0]
    rows += [
        ("transient", format_bytes(metrics.transient_bytes), "peak minus what stays"),
        ("kept per layer", f"{metrics.kept_tokens:,} tokens", f"{share:.1%} of the prompt, by {metrics.selector}"),
        ("decode", f"{metrics.decode_tokens_per_second:.1f} token/s", f"{metrics.new_tokens} new tokens"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def answer_as_dict(answer: Answer, model: str) -> dict[str, Any]:
    """An answer as JSON types."""
    return {
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "model": model,
        "citations": [
            {
                "document": citation.document_name,
                "page": citation.page,
                "label": citation.label,
                "origin": citation.origin,
                "verified": citation.verified,
                "quote": citation.quote,
                "score": citation.score,
            }
            for citation in answer.citations
        ],
        "prompt_tokens": answer.prompt_tokens,
        "warnings": list(answer.warnings),
        "metrics": answer.metrics.as_dict(),
    }


def show_models(models: Sequence[ModelInfo], *, as_json: bool) -> None:
    """The list of aliases."""
    if as_json:
        rows = [{**vars_of(model), "path": str(model.path)} for model in models]
        print(json.dumps(rows))
        return
    for model in models:
        state = f"{format_bytes(model.bytes)} in" if model.cached else f"a download of {format_bytes(model.bytes)}, to"
        print(f"{model.alias}: {model.description}\n  {state} {model.path}")
    print("\nAny Hugging Face id, folder with safetensors or GGUF file works too.")


def show_sessions(sessions: Sequence[StoredSession], *, as_json: bool) -> None:
    """The named sessions."""
    if as_json:
        print(json.dumps([asdict(session) for session in sessions]))
        return
    if not sessions:
        print("No sessions; tidekv ask --session NAME makes one.")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "documents", "tokens", "size", "last used"):
        table.add_column(heading, justify="right" if heading in ("documents", "tokens", "size") else "left")
    for one in sessions:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
        table.add_row(escape(one.name), str(one.documents), f"{one.tokens:,}", format_bytes(one.bytes), used)
    _print_table(table)


def show_removed(name: str, freed_bytes: int, *, as_json: bool) -> None:
    """That a session is gone."""
    if as_json:
        print(json.dumps({"removed": name, "bytes": freed_bytes}))
    else:
        print(f"Removed session {name}: {format_bytes(freed_bytes)} freed.")


def show_checks(checks: Sequence[Check], *, as_json: bool) -> None:
    """The doctor's report."""
    if as_json:
        print(json.dumps([check._asdict() for check in checks]))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]!![/red]"
        table.add_row(mark, check.item, escape(check.value))
        if check.hint:
            table.add_row("", "", f"[dim]{escape(check.hint)}[/dim]")
    _print_table(table)


def _print_table(table: Table) -> None:
    """Print whole rows: a terminal breaks a long line by itself, and a file or a copied path needs it unbroken."""
    console = Console(highlight=False)
    width = max(console.width, console.measure(table).maximum) if console.is_terminal else 1000
    console.print(table, width=width, crop=False, overflow="ignore", no_wrap=True)


def vars_of(model: ModelInfo) -> dict[str, Any]:
    """Fields of a dataclass with slots or without."""
    return {name: getattr(model, name) for name in model.__dataclass_fields__}
