"""What ``tidekv ask`` prints: progress on standard error; the answer, its citations and figures on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.text import Text

from tidekv_llm.cli.terminal import Bars, console, literal, one_row, print_json, print_table
from tidekv_llm.documents import ORIGINS
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    from tidekv_llm.documents import Citation, Document
    from tidekv_llm.engine import Answer
    from tidekv_llm.metrics import Metrics
    from tidekv_llm.request import Progress

COMPONENT_NAMES = {
    "weights": "weights",
    "ready_layer": "weights of one layer, ready",
    "active_kv": "full KV, one layer",
    "bridge": "hidden states",
    "activations": "activations",
    "temporary": "scratch buffers",
    "compressed_cache": "compressed cache",
    "document_store": "document store",
}


class AskConsole:
    """Progress and result of ``tidekv ask``.

    Args:
        as_json: print one JSON object and nothing else on standard output.
        quiet: no progress.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json = as_json
        self._out = console()
        self._error = console(stderr=True)
        self._watched = self._error.is_terminal and not (quiet or as_json)
        self._bars = Bars(hidden=not self._watched)
        self._answer_begun = False

    def __enter__(self) -> Self:
        self._bars.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def reading(self, path: str) -> Callable[[int, int], None]:
        """A callback for the pages of one file."""
        stage = f"Reading {Path(path).name}"
        return lambda done, total: self._bars.show(stage, done / max(total, 1), f"page {done} of {total}")

    def loading(self, message: str, fraction: float) -> None:
        """Progress of fetching the model."""
        self._bars.show("Model", fraction, message)

    def prefilling(self, progress: Progress) -> None:
        """Progress of the prefill."""
        detail = f"layer {progress.layer} of {progress.layers}, {progress.eta_seconds:.0f} s left"
        self._bars.show("Reading the prompt", progress.fraction, detail)

    def reasoning(self, delta: str) -> None:
        """A piece of what the model thinks before it answers: for whoever watches, no part of the answer."""
        self._bars.stop()
        if self._watched:
            self._error.print(Text(literal(delta, sys.stderr), "dim"), end="")

    def text(self, delta: str) -> None:
        """A piece of the answer, as it comes."""
        self._bars.stop()
        if self._as_json:
            return
        # Not through rich: it would expand tabs and drop spaces at line ends.
        sys.stdout.write(literal(delta if self._answer_begun else f"\n{delta}"))
        sys.stdout.flush()
        self._answer_begun = True

    def line(self, value: dict[str, Any]) -> None:
        """One of several answers, a line of JSON."""
        self._bars.stop()
        print_json(value)
        sys.stdout.flush()

    def show(self, answer: Answer, documents: Sequence[Document], model: str) -> None:
        """What follows the answer's text: citations, warnings and figures."""
        self._bars.stop()
        if self._as_json:
            print_json({"model": model, **answer.as_dict()})
            return
        print("" if self._answer_begun else "\n(the model gave an empty answer)")
        if answer.finish_reason == "length":
            self._print(("(cut at --max-new-tokens)", "dim"))
        print()
        for citation in answer.citations:
            self._print(*_citation_parts(citation, several=len(documents) > 1))
        for warning in answer.warnings:
            self._print(("note: ", "yellow"), warning)
        print_table(figures(answer.metrics, model), right=(1,), dim=(0, 2))
        for note in answer.metrics.notes:
            self._print((note, "dim"))

    def _print(self, *parts: str | tuple[str, str]) -> None:
        """One line of texts and (text, style) pairs."""
        pairs = [(part, "") if isinstance(part, str) else part for part in parts]
        self._out.print(Text.assemble(*((one_row(text), style) for text, style in pairs)))


def _citation_parts(citation: Citation, *, several: bool) -> list[str | tuple[str, str]]:
    name = f"{citation.document_name} " if several else ""
    origin = ORIGINS[citation.origin]
    if citation.origin == "model" and not citation.verified:
        origin += ", not verified on the page"
    quote = f"  {citation.quote}" if citation.quote else ""
    return [(f"[{name}p. {citation.label}]", "bold"), quote, (f" ({origin})", "dim")]


def figures(metrics: Metrics, model: str) -> list[tuple[str, str, str]]:
    """The figures of one answer: name, value with its unit, and what it says."""
    share = metrics.kept_tokens / max(metrics.prompt_tokens, 1)
    rows = [("prompt", f"{metrics.prompt_tokens:,} tokens", f"{model}, chunks of {metrics.chunk_size:,}")]
    if metrics.reused_prefix_tokens:
        reused = metrics.reused_prefix_tokens / max(metrics.prompt_tokens, 1)
        rows.append(("reused", f"{metrics.reused_prefix_tokens:,} tokens", f"{reused:.1%} of the prompt, read before"))
    return [
        *rows,
        ("time to first token", f"{metrics.ttft_seconds:.2f} s", f"compression {metrics.compress_seconds:.2f} s"),
        ("construction peak", format_bytes(metrics.construction_peak_bytes), "until the first token, of which"),
        *((f"  {label}", format_bytes(nbytes), "") for label, nbytes in _peak_parts(metrics) if nbytes > 0),
        ("transient", format_bytes(metrics.transient_bytes), "peak minus what stays"),
        ("kept per layer", f"{metrics.kept_tokens:,} tokens", f"{share:.1%} of the prompt, by {metrics.selector}"),
        ("decode", f"{metrics.decode_tokens_per_second:.1f} token/s", f"{metrics.new_tokens} new tokens"),
    ]


def _peak_parts(metrics: Metrics) -> list[tuple[str, int]]:
    parts = [(label, metrics.components.get(key, 0)) for key, label in COMPONENT_NAMES.items()]
    return [*parts, ("Python, libraries", metrics.construction_peak_bytes - sum(nbytes for _, nbytes in parts))]
