"""What an answer took, as HTML: time, memory beside what other schedules would take, and the pages that were kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidekv_apps.panels import render

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidekv_apps.records import Turn
    from tidekv_apps.visits import Visit
    from tidekv_llm.engine import Answer

# In the order in which bars are stacked.
_LABELS = {
    "weights": "weights",
    "active_kv": "active KV",
    "bridge": "bridge",
    "activations": "activations",
    "temporary": "temporary",
    "compressed_cache": "compressed cache",
    "bookkeeping": "bookkeeping",
    "document_store": "store for follow-ups",
    "rest": "rest of the process",
}
_SCHEDULES = {"tidekv": "TideKV", "post-prefill": "SnapKV, post-prefill", "one-shot": "One-shot prefill"}
MAX_STRIP_PAGES = 400


@dataclass(frozen=True)
class Part:
    """One component of memory: ``name`` is its colour, ``size`` is in bytes."""

    name: str
    label: str
    size: int


@dataclass(frozen=True)
class Bar:
    """What one run or plan takes beside the weights."""

    label: str
    parts: list[Part]

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class PageBar:
    """One page of the strip; ``height`` is in percent of the densest page."""

    tip: str
    height: float


def figures_panel(visit: Visit) -> str:
    """What the chosen answer took."""
    turn = visit.turn(visit.shown_turn)
    if turn is None or turn.answer is None:
        return render("no_figures.html")
    metrics = turn.answer.metrics
    bars = _bars(turn)
    return render(
        "figures.html",
        turn=turn,
        metrics=metrics,
        peak=_peak(metrics.components, metrics.construction_peak_bytes),
        peak_bytes=metrics.construction_peak_bytes,
        beside=bars,
        scale=max(bar.total for bar in bars),
        legend=_legend(bars),
        strip=_strip(turn.answer),
        pages=len(turn.answer.prompt.spans),
        by_layer=visit.by_layer,
        layers=_layers(turn.answer) if visit.by_layer else [],
    )


def _parts(components: Mapping[str, int]) -> list[Part]:
    known = [name for name in _LABELS if name in components]
    others = [name for name in components if name not in _LABELS]
    return [Part(name, _LABELS.get(name, name), components[name]) for name in (*known, *others)]


def _peak(components: Mapping[str, int], peak_bytes: int) -> list[Part]:
    return _parts({**components, "rest": max(0, peak_bytes - sum(components.values()))})


def _bars(turn: Turn) -> list[Bar]:
    """This run beside the predictions and the real runs of other schedules."""
    assert turn.answer is not None
    rows = [("This answer, measured", turn.answer.metrics.components)]
    rows += [(f"{_SCHEDULES.get(name, name)}, planned", parts) for name, parts in turn.predictions.items()]
    rows += [(f"{_SCHEDULES.get(run.schedule, run.schedule)}, run", run.components) for run in turn.comparisons]
    return [Bar(label, _working(components)) for label, components in rows]


def _working(components: Mapping[str, int]) -> list[Part]:
    """What building the cache takes; the store for follow-ups is a choice, not a part of it."""
    return [part for part in _parts(components) if part.name not in ("weights", "document_store")]


def _legend(bars: Sequence[Bar]) -> list[Part]:
    return _parts({part.name: part.size for bar in bars for part in bar.parts if part.size})


def _strip(answer: Answer) -> list[PageBar]:
    """How many positions each page kept, relative to the page that kept the largest share."""
    spans, kept = answer.prompt.spans, answer.page_strip
    if len(kept) != len(spans):
        return []
    total = max(sum(kept), 1)
    density = [count / max(span.stop - span.start, 1) for count, span in zip(kept, spans, strict=True)]
    highest = max(density, default=0) or 1.0
    return [
        PageBar(f"p. {span.label}: {count:,} positions kept, {count / total:.1%} of all", 100 * share / highest)
        for span, count, share in zip(spans[:MAX_STRIP_PAGES], kept, density, strict=False)
    ]


def _layers(answer: Answer) -> list[list[float]]:
    """One row per layer, one column per page: kept positions as a share of the highest."""
    rows = [row[:MAX_STRIP_PAGES] for row in answer.page_strip_by_layer]
    highest = max((count for row in rows for count in row), default=0) or 1
    return [[count / highest for count in row] for row in rows]
