"""Sessions, turns and documents for tests that need no model."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.documents.pdf_writer import text_pdf
from tidekv_apps.records import Entry, Turn
from tidekv_apps.settings import AskSettings, Limits
from tidekv_apps.storage import Storage
from tidekv_apps.visits import Visit
from tidekv_llm.documents import Citation, Document, PageSpan, Prompt
from tidekv_llm.engine import Answer
from tidekv_llm.metrics import Metrics

MODEL = "smollm2-135m"
HARBOUR = text_pdf(
    ["Harbour rules.", "The gate opens at six in the morning.", "The harbour master is Ida Holm."],
    ["Fees.", "A berth costs 42 crowns a night.", "Boats longer than 12 metres pay double."],
)
GARDEN = text_pdf(["Garden rules.", "The pond is 3 metres deep.", "The gardener is called Otto Brandt."])


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def make_visit(folder: Path, limits: Limits | None = None) -> Visit:
    own = folder / "visit"
    own.mkdir(exist_ok=True)
    return Visit("owner", own, AskSettings(model=MODEL), Storage(limits or Limits()))


def entry(name: str, *texts: str, state: Any = "ready") -> Entry:
    document = Document.from_pages(texts or ("text",), name) if state == "ready" else None
    return Entry(name=name, path=Path("/nowhere"), digest=name, state=state, document=document)


def turn(
    question: str = "Why?", text: str = "Because.", *, name: str = "a.pdf", quote: str | None = "Because."
) -> Turn:
    document = Document.from_pages(["Because.", "More."], name)
    spans = (PageSpan(0, 1, "1", 10, 20), PageSpan(0, 2, "2", 20, 40))
    citation = Citation(0, name, 1, "1", "text", False, quote, 0.5)
    components = {"weights": 100 << 20, "active_kv": 5 << 20, "activations": 20 << 20}
    answer = Answer(
        text=text,
        reasoning="",
        citations=(citation,),
        metrics=Metrics(prompt_tokens=50, kept_tokens=10, construction_peak_bytes=200 << 20, components=components),
        prompt_tokens=50,
        finish_reason="stop",
        warnings=(),
        prompt=Prompt(tuple(range(50)), spans, document_end=40, question=question),
        evidence=None,
        page_strip_by_layer=((20, 5), (10, 5)),
    )
    made = Turn(question, (document,), ("k",), f"{name} pages 1-2", MODEL, text=text, state="done")
    made.answer = answer
    return made


class Tags(HTMLParser):
    """Tag names and attributes of a piece of HTML, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())
