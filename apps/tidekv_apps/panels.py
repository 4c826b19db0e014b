"""The page's parts as HTML.

Every text comes through an autoescaping template: none of a user's, a file's or a model's words becomes markup.
Elements with ``data-act`` are clicked through to the server (see static/app.js); the server checks what they carry.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.documents import ORIGINS
from tidekv_llm.documents.pdf import format_numbers
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment

    from tidekv_apps.budget import Budget
    from tidekv_apps.jobs import Job
    from tidekv_apps.records import Entry
    from tidekv_apps.visits import Visit

EXAMPLES = (
    "How much fuel does the main tank hold?",
    "How often are the generators run?",
)
_TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["size"] = format_bytes
    environment.globals.update(origins=ORIGINS, examples=EXAMPLES)
    return environment


def render(template: str, **values: Any) -> str:
    """A template of the folder ``templates``, filled in; whatever the values spell is text in it."""
    return _environment().get_template(template).render(values)


def notice(text: str, kind: str = "note") -> str:
    """One line of information or error."""
    return render("notice.html", text=text, kind=kind) if text else ""


def documents_panel(visit: Visit, reading: Job | None = None) -> str:
    """The list of files with their states, and what was put aside."""
    running = reading is not None and not reading.finished.is_set()
    return render("documents.html", entries=list(visit.entries), parked=list(visit.parked), reading=running)


def budget_panel(budget: Budget | None, problem: str = "") -> str:
    """The bar before asking: document, history, question and reserve against the window."""
    if budget is None:
        return ""
    parts = (
        ("document", "documents", budget.document),
        ("history", "history", budget.history),
        ("question", "question", budget.question),
        ("answer", "answer, at most", budget.answer),
    )
    return render("budget.html", budget=budget, problem=problem, parts=parts)


def conversation_panel(visit: Visit) -> str:
    """All turns but the running one's live part."""
    return render("conversation.html", turns=list(visit.turns), shown=visit.shown_turn)


def live_panel(job: Job | None) -> str:
    """Progress and the answer as it grows."""
    return "" if job is None or job.finished.is_set() else render("live.html", live=job.live)


def left_out(entry: Entry) -> str:
    """Pages of a file that are not sent, as a line; empty if all are."""
    if entry.document is None:
        return ""
    chosen = entry.selected()
    sent = {page.number for page in chosen.pages if page.readable} if chosen else set()
    left = [page.number for page in entry.document.pages if page.number not in sent]
    return f"not sent: pages {format_numbers(left)}" if left else ""
