"""HTML of the page's parts. Everything that comes from a user, a file or a model goes through :func:`esc`.

Elements with ``data-act`` are clicked through to the server (see static/app.js); the server checks what they carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from tidekv_apps.budget import Budget
from tidekv_apps.jobs import Job
from tidekv_apps.records import Entry, Turn
from tidekv_apps.visits import Visit
from tidekv_llm.documents.pdf import format_numbers
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    from tidekv_llm.documents import Citation
    from tidekv_llm.metrics import Metrics

COMPONENT_NAMES = {
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
_ORDER = {name: at for at, name in enumerate(COMPONENT_NAMES)}
ORIGINS = {"model": "named by the model", "text": "words found on the page", "attention": "read most, by attention"}
_KEPT_LABELS = {"tidekv": "TideKV", "post-prefill": "SnapKV, post-prefill", "one-shot": "One-shot prefill"}
MAX_STRIP_PAGES = 400
EXAMPLES = (
    "How much fuel does the main tank hold?",
    "How often are the generators run?",
)


def esc(text: object) -> str:
    """Text as HTML shows it, quotes included."""
    return escape(str(text), quote=True)


def button(label: str, act: str, arg: str = "", *, title: str = "", css: str = "link") -> str:
    """A real button, so that the keyboard reaches it."""
    tip = f' title="{esc(title)}"' if title else ""
    data = f'data-act="{esc(act)}" data-arg="{esc(arg)}"'
    return f'<button type="button" class="{esc(css)}" {data}{tip}>{esc(label)}</button>'


def notice(text: str, kind: str = "note") -> str:
    """One line of information or error."""
    return f'<p class="tk-{esc(kind)}" role="status">{esc(text)}</p>' if text else ""


# --- documents ------------------------------------------------------------------------------------------


def documents_panel(visit: Visit, reading: Job | None = None) -> str:
    """The list of files with their states, and what was put aside."""
    rows = "".join(_entry(entry, at, len(visit.entries)) for at, entry in enumerate(visit.entries))
    empty = '<p class="tk-dim">No document yet. Drop a PDF, text or Markdown file above, or take the example.</p>'
    parts = [f'<ul class="tk-docs">{rows}</ul>' if rows else empty]
    if visit.parked:
        names = ", ".join(entry.name for entry in visit.parked)
        parts.append(
            f'<div class="tk-warn">Earlier documents were taken out, so that no answer comes from them: {esc(names)} '
            f"{button('Bring back', 'restore')}</div>"
        )
    if reading is not None and not reading.finished.is_set():
        parts.append(button("Stop reading", "stop-reading", css="small"))
    return "".join(parts)


def _entry(entry: Entry, at: int, count: int) -> str:
    tools = "".join(
        (
            button("↑", "up", entry.key, title=f"Move {entry.name} up", css="icon") if at else "",
            button("↓", "down", entry.key, title=f"Move {entry.name} down", css="icon") if at < count - 1 else "",
            button("✕", "remove", entry.key, title=f"Remove {entry.name}", css="icon"),
        )
    )
    name = f'<span class="tk-name" title="{esc(entry.name)}">{esc(entry.name)}</span>'
    head = f'<div class="tk-doc-head">{name}{tools}</div>'
    return f'<li class="tk-doc tk-{entry.state}">{head}{_entry_body(entry)}</li>'


def _entry_body(entry: Entry) -> str:
    if entry.state == "reading":
        share = entry.done / entry.total if entry.total else 0
        label = f"page {entry.done:,} of {entry.total:,}" if entry.total else "opening"
        return f"{_progress(share)}<span class='tk-dim tk-num'>{esc(label)}</span>"
    if entry.state == "failed":
        return f'<p class="tk-error" role="alert">{esc(entry.error)} (left out)</p>'
    if entry.state == "locked":
        wrong = f'<p class="tk-error" role="alert">{esc(entry.error)}</p>' if entry.error else ""
        return (
            f'{wrong}<div class="tk-inline"><input type="password" autocomplete="off" placeholder="Password" '
            f'aria-label="Password for {esc(entry.name)}" data-submit="unlock" data-arg="{esc(entry.key)}">'
            f"{button('Unlock', 'unlock', entry.key, css='small')}</div>"
        )
    return _ready_body(entry)


def _ready_body(entry: Entry) -> str:
    assert entry.document is not None
    pages = entry.document.pages
    good = sum(page.readable for page in pages)
    unread = len(pages) - good
    counts = f"{good:,} of {len(pages):,} pages readable" if unread else f"{len(pages):,} page{'s' * (len(pages) != 1)}"
    warnings = "".join(f"<li>{esc(warning)}</li>" for warning in entry.document.warnings[:12])
    more = len(entry.document.warnings) - 12
    warnings += f"<li>and {more} more</li>" if more > 0 else ""
    listed = f'<ul class="tk-warnings">{warnings}</ul>' if warnings else ""
    return (
        f'<div class="tk-inline"><span class="tk-dim tk-num">{esc(counts)}</span>'
        f"{button('Text', 'text', entry.key, title='What the model is given, page by page')}</div>{listed}"
        f'<label class="tk-inline tk-dim">Pages <input type="text" value="{esc(entry.pages)}" '
        f'placeholder="all, or 1-3,7" data-submit="pages" data-arg="{esc(entry.key)}" '
        f'aria-label="Pages of {esc(entry.name)} to send"></label>'
    )


def _progress(share: float) -> str:
    percent = max(0.0, min(1.0, share)) * 100
    return (
        f'<div class="tk-bar" role="progressbar" aria-valuenow="{percent:.0f}" aria-valuemin="0" aria-valuemax="100">'
        f'<i style="width:{percent:.1f}%"></i></div>'
    )


def budget_panel(budget: Budget | None, problem: str = "") -> str:
    """The bar before asking: document, history, question and reserve against the window."""
    if budget is None:
        return ""
    scale = max(budget.limit, budget.total, 1)
    parts = (
        ("document", budget.document),
        ("history", budget.history),
        ("question", budget.question),
        ("answer", budget.answer),
    )
    bars = "".join(
        f'<i class="tk-b-{name}" style="width:{100 * size / scale:.2f}%" title="{name}: {size:,} tokens"></i>'
        for name, size in parts
    )
    mark = f'<b style="left:{100 * budget.limit / scale:.2f}%"></b>' if budget.total > budget.limit else ""
    rows = "".join(
        f'<tr><td><i class="tk-key tk-b-{name}"></i>{label}</td><td class="tk-num">{size:,}</td></tr>'
        for (name, size), label in zip(parts, ("documents", "history", "question", "answer, at most"), strict=True)
    )
    return (
        f'<div class="tk-budget"><div class="tk-inline"><strong>Budget</strong><span class="tk-num">{budget.total:,} / '
        f'{budget.limit:,} tokens</span></div><div class="tk-bar tk-stack">{bars}{mark}</div>'
        f"<table>{rows}</table>{_verdict(budget, problem)}</div>"
    )


def _verdict(budget: Budget, problem: str) -> str:
    if budget.fits and not problem:
        return '<p class="tk-ok">Fits: the whole of every chosen page is sent.</p>'
    if budget.fits:
        return f'<p class="tk-error" role="alert">{esc(problem)}</p>'
    if budget.strategy == "best pages":
        return (
            '<p class="tk-warn">Too long to send whole: the pages that match the question best (BM25) are sent, and '
            "the answer says which.</p>"
        )
    over = budget.total - budget.limit
    return (
        f'<p class="tk-error" role="alert">{budget.total:,} tokens do not fit the window of {budget.limit:,} '
        f"({over:,} too many). Choose pages above, or switch on best pages below.</p>"
    )


# --- conversation ---------------------------------------------------------------------------------------


def conversation(visit: Visit) -> str:
    """All turns but the running one's live part."""
    if not visit.turns:
        examples = "".join(
            f"<li>{button(text, 'example', str(at), css='chip')}</li>" for at, text in enumerate(EXAMPLES)
        )
        return (
            '<div class="tk-empty"><p>Add a document and ask. The model reads all of it; every answer names its pages '
            "and what it took in time and memory.</p><p>Or ask the lighthouse handbook that comes with the app:</p>"
            f"<ul>{examples}</ul></div>"
        )
    return "".join(_turn(turn, visit.shown_turn) for turn in visit.turns)


def _turn(turn: Turn, shown: str | None) -> str:
    changed = (
        '<p class="tk-dim tk-rule">The documents changed here: later answers do not know the ones above.</p>'
        if turn.document_changed
        else ""
    )
    question = f'<div class="tk-q"><span class="tk-who">You</span><div class="tk-text">{esc(turn.question)}</div></div>'
    if turn.state == "running":
        return changed + question
    return f"{changed}{question}{_reply(turn, shown)}"


def _reply(turn: Turn, shown: str | None) -> str:
    text = f'<div class="tk-text">{esc(turn.text)}</div>' if turn.text else ""
    if turn.state == "failed":
        text += f'<p class="tk-error" role="alert">{esc(turn.error)}</p>'
    elif turn.state == "stopped":
        text += '<p class="tk-dim">Stopped.</p>'
    elif not turn.text:
        text += '<p class="tk-dim">The model gave an empty answer.</p>'
    cut = turn.answer is not None and turn.answer.finish_reason == "length"
    note = '<p class="tk-dim">Cut at the longest answer; raise it in the settings.</p>' if cut else ""
    tools = ""
    if turn.answer is not None:
        current = " current" if turn.key == shown else ""
        copy = f'<button type="button" class="link" data-copy="{esc(turn.text)}">Copy</button>'
        tools = (
            f'<div class="tk-inline tk-tools">{copy}'
            f"{button('Figures', 'figures', turn.key, css='link' + current)}"
            f'<span class="tk-dim" title="{esc(turn.sent)}">{esc(_short(turn.sent, 90))}</span></div>'
        )
    return f'<div class="tk-a"><span class="tk-who">TideKV</span>{text}{note}{_citations(turn)}{tools}</div>'


def _citations(turn: Turn) -> str:
    if turn.answer is None or not turn.answer.citations:
        return ""
    several = len(turn.documents) > 1
    items = "".join(_citation(turn, at, cite, several) for at, cite in enumerate(turn.answer.citations))
    return f'<ul class="tk-cites" aria-label="Pages">{items}</ul>'


def _citation(turn: Turn, at: int, citation: Citation, several: bool) -> str:
    name = f"{citation.document_name} " if several else ""
    mark = "verified" if citation.verified else "unverified" if citation.origin != "attention" else "by attention"
    quote = (
        f"<q>{esc(citation.quote)}</q>" if citation.quote else f'<span class="tk-dim">{ORIGINS[citation.origin]}</span>'
    )
    tip = f"{ORIGINS[citation.origin]}; {mark}. Open the page"
    return (
        f"<li>{button(f'{name}p. {citation.label}', 'cite', f'{turn.key}:{at}', title=tip, css='chip')}"
        f'<span class="tk-mark tk-{"ok" if citation.verified else "dim"}">{mark}</span>{quote}</li>'
    )


def live_panel(job: Job | None) -> str:
    """Progress and the answer as it grows."""
    if job is None or job.finished.is_set():
        return ""
    live = job.live
    text = f'<div class="tk-text">{esc(live.text)}<span class="tk-caret"></span></div>' if live.text else ""
    if live.stage == "Answering":
        return f'<div class="tk-a"><span class="tk-who">TideKV</span>{text}</div>'
    percent = f"{100 * live.fraction:.0f}%" if live.fraction is not None else ""
    bar = _progress(live.fraction) if live.fraction is not None else ""
    stage = live.stage or "Starting"
    return (
        f'<div class="tk-live" role="status"><div class="tk-inline"><strong>{esc(stage)}</strong>'
        f'<span class="tk-num">{percent}</span></div>{bar}<span class="tk-dim tk-num">{esc(live.detail)}</span></div>'
    )


# --- figures --------------------------------------------------------------------------------------------


def figures_panel(visit: Visit) -> str:
    """What the chosen answer took."""
    turn = visit.turn(visit.shown_turn)
    if turn is None or turn.answer is None:
        return '<p class="tk-dim">Time, memory and kept pages of an answer appear here.</p>'
    metrics = turn.answer.metrics
    return "".join(
        (
            _headline(metrics),
            _table(metrics),
            _peak(metrics),
            _beside(turn, metrics),
            _strip(turn, visit.by_layer),
            _notes(metrics.notes),
        )
    )


def _headline(metrics: Metrics) -> str:
    rate = f"{metrics.decode_tokens_per_second:.1f}" if metrics.decode_tokens_per_second else "–"
    items = (
        (f"{metrics.ttft_seconds:.2f}", "s", "to first token"),
        (rate, "token/s", "decode"),
        (*format_bytes(metrics.transient_bytes).split(" "), "transient peak"),
    )
    cells = "".join(
        f'<div><b class="tk-num">{esc(value)}</b> <span>{esc(unit)}</span><small>{esc(name)}</small></div>'
        for value, unit, name in items
    )
    return f'<div class="tk-headline">{cells}</div>'


def _table(metrics: Metrics) -> str:
    share = metrics.kept_tokens / max(metrics.prompt_tokens, 1)
    rows = (
        ("prompt", f"{metrics.prompt_tokens:,}", "tokens"),
        ("prefix reused", f"{metrics.reused_prefix_tokens:,}", "tokens"),
        ("kept per layer", f"{metrics.kept_tokens:,}", f"tokens ({share:.1%})"),
        ("cache", *format_bytes(metrics.cache_bytes).split(" ")),
        ("compression", f"{metrics.compress_seconds:.2f}", "s"),
        ("answer", f"{metrics.new_tokens:,}", "tokens"),
        ("chunk", f"{metrics.chunk_size:,}", "tokens"),
    )
    cells = "".join(
        f'<tr><th>{esc(name)}</th><td class="tk-num">{esc(value)}</td><td>{esc(unit)}</td></tr>'
        for name, value, unit in rows
    )
    about = f"{metrics.schedule}, {metrics.selector}"
    return f'<table class="tk-figures">{cells}<tr><th>how</th><td colspan="2">{esc(about)}</td></tr></table>'


def _peak(metrics: Metrics) -> str:
    parts = dict(metrics.components)
    peak = metrics.construction_peak_bytes
    parts["rest"] = max(0, peak - sum(parts.values()))
    rows = "".join(
        f'<tr><th><i class="tk-key tk-c-{esc(name)}"></i>{esc(COMPONENT_NAMES.get(name, name))}</th>'
        f'<td class="tk-num">{format_bytes(size).split(" ")[0]}</td><td>{format_bytes(size).split(" ")[1]}</td></tr>'
        for name, size in parts.items()
    )
    return (
        f'<h3>Construction peak <span class="tk-num">{esc(format_bytes(peak))}</span></h3>{_stack(parts, peak)}'
        f'<details><summary>Components</summary><table class="tk-figures">{rows}</table></details>'
    )


def _stack(parts: dict[str, int], scale: int) -> str:
    bars = "".join(
        f'<i class="tk-c-{esc(name)}" style="width:{100 * size / max(scale, 1):.2f}%" '
        f'title="{esc(COMPONENT_NAMES.get(name, name))}: {esc(format_bytes(size))}"></i>'
        for name, size in sorted(parts.items(), key=lambda part: _ORDER.get(part[0], len(_ORDER)))
        if size
    )
    return f'<div class="tk-bar tk-stack tk-tall">{bars}</div>'


def _beside(turn: Turn, metrics: Metrics) -> str:
    """This run's working set beside the predictions and the real runs of other schedules, weights left out."""
    rows = [("This answer, measured", _working(metrics.components))]
    rows += [(f"{_KEPT_LABELS.get(name, name)}, planned", _working(parts)) for name, parts in turn.predictions.items()]
    rows += [
        (f"{_KEPT_LABELS.get(run.schedule, run.schedule)}, run", _working(run.components)) for run in turn.comparisons
    ]
    scale = max((sum(parts.values()) for _, parts in rows), default=1)
    lines = "".join(
        f'<div class="tk-row"><div class="tk-inline"><span>{esc(label)}</span><span class="tk-num">'
        f"{esc(format_bytes(sum(parts.values())))}</span></div>{_stack(parts, scale)}</div>"
        for label, parts in rows
    )
    legend = "".join(
        f'<span><i class="tk-key tk-c-{name}"></i>{label}</span>'
        for name, label in COMPONENT_NAMES.items()
        if any(name in parts and parts[name] for _, parts in rows)
    )
    runs = "".join(
        f'<tr><th>{esc(run.schedule)}</th><td class="tk-num">{run.ttft_seconds:.2f} s</td>'
        f'<td class="tk-num">{esc(format_bytes(run.transient_bytes))}</td></tr>'
        for run in turn.comparisons
    )
    table = (
        f'<table class="tk-figures"><tr><th>run</th><td>first token</td><td>transient</td></tr>{runs}</table>'
        if runs
        else ""
    )
    return f'<h3>Working set beside the weights</h3>{lines}<div class="tk-legend">{legend}</div>{table}'


def _working(parts: dict[str, int]) -> dict[str, int]:
    """What building the cache takes; the store for follow-ups is a choice, not a part of it."""
    return {name: size for name, size in parts.items() if name not in ("weights", "document_store")}


def _strip(turn: Turn, by_layer: bool) -> str:
    """How many positions each page kept, relative to the page that kept the largest share."""
    assert turn.answer is not None
    spans = turn.answer.prompt.spans
    kept: Sequence[int] = getattr(turn.answer, "page_strip", ()) or ()
    if not spans or len(kept) != len(spans):
        return ""
    total = max(sum(kept), 1)
    density = [count / max(span.stop - span.start, 1) for count, span in zip(kept, spans, strict=True)]
    highest = max(density) or 1.0
    cells = []
    for at, (span, count) in enumerate(zip(spans, kept, strict=True)):
        if at >= MAX_STRIP_PAGES:
            break
        tip = f"p. {span.label}: {count:,} positions kept, {count / total:.1%} of all"
        cells.append(
            f'<button type="button" data-act="strip" data-arg="{esc(turn.key)}:{at}" title="{esc(tip)}" '
            f'aria-label="{esc(tip)}"><i style="height:{100 * density[at] / highest:.0f}%"></i></button>'
        )
    left = f" The first {MAX_STRIP_PAGES} of {len(spans):,} pages." if len(spans) > MAX_STRIP_PAGES else ""
    layers = _layer_map(turn) if by_layer else ""
    toggle = button("Hide layers" if by_layer else "Per layer", "layers")
    return (
        f'<h3>Pages kept {toggle}</h3><div class="tk-strip">{"".join(cells)}</div>'
        f'<p class="tk-dim">Height: kept positions per token of the page. Click to open.{esc(left)}</p>{layers}'
    )


def _layer_map(turn: Turn) -> str:
    """One row per layer, one column per page, darker where more was kept."""
    rows: Sequence[Sequence[int]] = getattr(turn.answer, "page_strip_by_layer", ()) or ()
    if not rows:
        return ""
    pages = min(len(rows[0]), MAX_STRIP_PAGES)
    highest = max((value for row in rows for value in row), default=1) or 1
    marks = "".join(
        f'<rect x="{x}" y="{y}" width="1" height="1" opacity="{row[x] / highest:.2f}"/>'
        for y, row in enumerate(rows)
        for x in range(pages)
        if row[x]
    )
    return (
        f'<svg class="tk-layers" viewBox="0 0 {pages} {len(rows)}" preserveAspectRatio="none" role="img" '
        f'aria-label="Kept positions per layer and page">{marks}</svg>'
        f'<p class="tk-dim">Rows: layers 1 to {len(rows)}. Columns: pages.</p>'
    )


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{esc(note)}</li>" for note in notes)
    return f'<ul class="tk-warnings">{items}</ul>' if items else ""


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def extracted_table(entry: Entry, tokens: dict[int, int]) -> list[str]:
    """One summary row per page for the extracted-text view."""
    assert entry.document is not None
    return [
        f"p. {page.label} · {len(page.text):,} characters · {tokens.get(page.number, 0):,} tokens"
        + (f" · {page.problem}" if page.problem else "")
        for page in entry.document.pages
    ]


def excluded(entry: Entry) -> str:
    """Pages of a file that are not sent, as a line; empty if all are."""
    if entry.document is None:
        return ""
    chosen = entry.selected()
    sent = {page.number for page in chosen.pages if page.readable} if chosen else set()
    left = [page.number for page in entry.document.pages if page.number not in sent]
    return f"not sent: pages {format_numbers(left)}" if left else ""
