"""A conversation as Markdown or JSON, with every figure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tidekv_llm.sizes import format_bytes

_MARKUP = re.compile(r"([\\`*_\[\]<>#|!$&~])")
_WORD = r"""[^\s`<>()\[\]"'!]*"""
_ADDRESS = re.compile(rf"({_WORD}(?:://|www\.|@|mailto:|xmpp:){_WORD})", re.IGNORECASE)

if TYPE_CHECKING:
    from tidekv_apps.records import Turn
    from tidekv_apps.visits import Visit


def as_json(visit: Visit) -> str:
    """All turns, with documents, citations, metrics, predictions and comparison runs."""
    data = {"documents": [_document(entry) for entry in visit.entries], "turns": [_turn(t) for t in visit.turns]}
    return json.dumps(data, ensure_ascii=False, indent=2)


def turn_as_dict(turn: Turn) -> dict[str, Any]:
    """One turn as JSON types."""
    return _turn(turn)


def _document(entry: Any) -> dict[str, Any]:
    pages = entry.document.pages if entry.document else ()
    return {
        "name": entry.name,
        "sha256": entry.digest,
        "state": entry.state,
        "pages": len(pages),
        "readable_pages": sum(page.readable for page in pages),
        "selected": entry.pages or "all",
        "warnings": list(entry.document.warnings) if entry.document else [],
        "error": entry.error,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    data: dict[str, Any] = {
        "question": turn.question,
        "state": turn.state,
        "error": turn.error,
        "sent": turn.sent,
        "model": turn.model,
    }
    if turn.answer is None:
        return {**data, "answer": turn.text}
    answer = turn.answer
    strip = [
        {"document": span.document, "page": span.page, "kept": kept}
        for span, kept in zip(answer.prompt.spans, answer.page_strip, strict=False)
    ]
    return {
        **data,
        **answer.as_dict(),
        "page_strip": strip,
        "predicted_peak_components": turn.predictions,
        "comparisons": [vars(run) for run in turn.comparisons],
    }


def as_markdown(visit: Visit) -> str:
    """The conversation to read, with a line of figures under each answer."""
    parts = ["# Questions about " + (", ".join(_plain(e.name) for e in visit.entries) or "no document"), ""]
    for turn in visit.turns:
        parts += [
            f"## {_plain(turn.question)}",
            "",
            _plain(turn.text) or _plain(f"({turn.state}) {turn.error}".strip()),
            "",
        ]
        if turn.answer is not None:
            parts += [*_citations(turn), _figures(turn), ""]
    return "\n".join(parts)


def _citations(turn: Turn) -> list[str]:
    assert turn.answer is not None
    lines = []
    for citation in turn.answer.citations:
        checked = "verified" if citation.verified else "unverified"
        quote = f": “{_plain(citation.quote)}”" if citation.quote else ""
        lines.append(
            f"- {_plain(citation.document_name)}, p. {_plain(citation.label)} ({citation.origin}, {checked}){quote}"
        )
    return [*lines, ""] if lines else []


def _figures(turn: Turn) -> str:
    assert turn.answer is not None
    m = turn.answer.metrics
    figures = (
        f"{m.prompt_tokens:,} prompt tokens ({m.reused_prefix_tokens:,} reused)",
        f"first token after {m.ttft_seconds:.2f} s",
        f"construction peak {format_bytes(m.construction_peak_bytes)}",
        f"transient {format_bytes(m.transient_bytes)}",
        f"kept {m.kept_tokens:,} tokens a layer",
        f"cache {format_bytes(m.cache_bytes)}",
        f"{m.decode_tokens_per_second:.1f} token/s",
    )
    return f"*{_plain(turn.model)}: {', '.join(figures)}*"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: no link, image or tag comes out of a document, an answer or an error.

    What a viewer would make a link of by itself becomes code, which none does.
    """
    parts = _ADDRESS.split(text)
    return "".join(f"`{part}`" if at % 2 else _MARKUP.sub(r"\\\1", part) for at, part in enumerate(parts))
