"""The page: three zones, and which handler each element calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from tidekv_apps import panels
from tidekv_apps.api import Endpoints
from tidekv_apps.events import PageEvents, panel
from tidekv_apps.figures import figures_panel
from tidekv_apps.files import file_drop
from tidekv_apps.services import Services
from tidekv_apps.settings import MAX_QUESTION_CHARACTERS, AskSettings, Limits
from tidekv_apps.storage import Storage
from tidekv_apps.visits import Visit
from tidekv_llm.config import HEAD_BUDGETS, LAYER_BUDGETS, SCHEDULES, selector_names

STATIC = Path(__file__).parent / "static"
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
THEME = gr.themes.Base(
    primary_hue="teal",
    neutral_hue="gray",
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)


class WebPage:
    """Builds the Blocks and holds the components that events change."""

    def __init__(self, services: Services) -> None:
        self.services, self.events = services, PageEvents(services)
        self.blocks = gr.Blocks(title="TideKV", delete_cache=(600, 3600), analytics_enabled=False, fill_width=True)
        with self.blocks:
            _html(panels.render("head.html"), "tk-head")
            with gr.Row(elem_id="tk-zones"):
                with gr.Column(elem_id="tk-documents"):
                    self._documents()
                with gr.Column(elem_id="tk-talk"):
                    self._talk()
                with gr.Column(elem_id="tk-figures"):
                    self._figures()
            self.viewer = _html("", "tk-viewer")
            self._wire()
            self._wire_settings()
            with gr.Column(visible=False):
                Endpoints(services).wire()

    # --- zones ------------------------------------------------------------------------------------------

    def _documents(self) -> None:
        _html("<h2>Documents</h2>")
        self.status = _html("", "tk-status")
        self.files = file_drop(
            file_count="multiple",
            file_types=[".pdf", ".txt", ".md"],
            label="Drop PDF, text or Markdown files",
            height=110,
            elem_id="tk-files",
        )
        self.documents = _html(panels.documents_panel(_nobody()), "tk-document-list")
        self.budget = _html("", "tk-budget-panel")
        self.retrieval = gr.Checkbox(
            label="Best pages only, when not all fit (BM25)", value=False, elem_id="tk-retrieval", container=False
        )
        with gr.Accordion("Settings for the next question", open=False, elem_id="tk-settings"):
            self._settings()

    def _settings(self) -> None:
        first = AskSettings(model=self.services.options.models[0])
        models = list(self.services.options.models)
        self.settings: dict[str, Any] = {
            "model": gr.Dropdown(models, value=first.model, label="Model", interactive=True),
            "context_window": gr.Textbox("", label="Context window, tokens", placeholder="the model's own"),
            "kept_tokens": gr.Number(first.kept_tokens, label="Kept tokens per layer", precision=0),
            "chunk_size": gr.Dropdown(
                ["auto", "128", "256", "512", "1024", "2048"], value="auto", label="Chunk size, tokens"
            ),
            "selector": gr.Dropdown(list(selector_names()), value=first.selector, label="Selector"),
            "layer_budget": gr.Dropdown(list(LAYER_BUDGETS), value=first.layer_budget, label="Layer budget"),
            "head_budget": gr.Dropdown(list(HEAD_BUDGETS), value=first.head_budget, label="Head budget"),
            "schedule": gr.Dropdown(list(SCHEDULES), value=first.schedule, label="Schedule"),
            "max_new_tokens": gr.Number(first.max_new_tokens, label="Longest answer, tokens", precision=0),
            "temperature": gr.Number(first.temperature, label="Temperature", step=0.1),
            "top_p": gr.Number(first.top_p, label="Top p", step=0.05),
            "top_k": gr.Number(first.top_k, label="Top k (0: off)", precision=0),
            "seed": gr.Textbox("", label="Seed", placeholder="none"),
        }
        self.settings_note = _html("", "tk-settings-note")

    def _talk(self) -> None:
        with gr.Row(elem_id="tk-talk-head"):
            _html("<h2>Conversation</h2>")
            self.save_markdown = gr.Button("Export Markdown", size="sm", elem_id="tk-export-md")
            self.save_json = gr.Button("Export JSON", size="sm", elem_id="tk-export-json")
            self.clear = gr.Button("New conversation", size="sm", elem_id="tk-clear")
        with gr.Group(elem_id="tk-scroll"):
            self.conversation = _html(panels.conversation_panel(_nobody()), "tk-conversation")
            self.live = _html("", "tk-live-panel")
            self.notice = _html("", "tk-notice")
        with gr.Row(elem_id="tk-ask-row"):
            self.question = gr.Textbox(
                placeholder="Ask about the documents",
                label="Question",
                show_label=False,
                container=False,
                lines=2,
                max_lines=6,
                max_length=MAX_QUESTION_CHARACTERS,
                elem_id="tk-question",
            )
            self.ask = gr.Button("Ask", variant="primary", interactive=False, elem_id="tk-ask")
            self.stop = gr.Button("Stop", interactive=False, elem_id="tk-stop")

    def _figures(self) -> None:
        _html("<h2>This answer</h2>")
        self.figures = _html(figures_panel(_nobody()), "tk-figures-panel")
        with gr.Accordion("Compare with a real run", open=False, elem_id="tk-compare"):
            others = [name for name in SCHEDULES if name != "tidekv"]
            self.schedule = gr.Dropdown(others, value=others[0], label="Schedule, same prompt, to the first token")
            self.compare = gr.Button("Run it", size="sm", elem_id="tk-compare-run")

    # --- events -----------------------------------------------------------------------------------------

    @property
    def outputs(self) -> list[Any]:
        """What a view fills, in the order of :data:`tidekv_apps.events.PARTS`."""
        return [
            self.status,
            self.documents,
            self.budget,
            self.conversation,
            self.live,
            self.notice,
            self.figures,
            self.viewer,
            self.ask,
            self.stop,
        ]

    def _wire(self) -> None:
        outputs, events = self.outputs, self.events
        self.blocks.load(events.on_load, None, outputs, **PRIVATE)
        self.blocks.unload(events.on_unload)
        self.files.upload(events.on_upload, [self.files], [*outputs, self.files], **PRIVATE)
        for part in (self.documents, self.conversation, self.figures, self.viewer):
            part.click(events.on_act, [self.question], outputs, **PRIVATE)
        for trigger in (self.ask.click, self.question.submit):
            trigger(events.on_ask, [self.question], [*outputs, self.question], **PRIVATE)
        self.stop.click(events.on_stop, None, outputs, queue=False, **PRIVATE)
        self.clear.click(events.on_clear, None, outputs, **PRIVATE)
        self.compare.click(events.on_compare, [self.schedule], outputs, **PRIVATE)
        self.question.change(
            events.on_typing, [self.question], [self.budget, self.ask], trigger_mode="always_last", **PRIVATE
        )
        self._wire_export(self.save_markdown, events.on_export_markdown, "tidekv.md", "text/markdown")
        self._wire_export(self.save_json, events.on_export_json, "tidekv.json", "application/json")

    def _wire_export(self, button: gr.Button, export: Any, name: str, mime: str) -> None:
        text = gr.Textbox(visible=False)
        save = f"(text) => window.tidekvSave(text, '{name}', '{mime}')"
        button.click(export, None, text, **PRIVATE).then(None, text, None, js=save)

    def _wire_settings(self) -> None:
        fields = {**self.settings, "retrieval": self.retrieval}
        gr.on(
            # A Textbox tells of typing by "change" only; nothing but the user changes these.
            [field.change if isinstance(field, gr.Textbox) else field.input for field in fields.values()],
            self.events.on_settings(tuple(fields)),
            [*fields.values(), self.question],
            [self.settings_note, self.budget, self.ask],
            trigger_mode="always_last",
            **PRIVATE,
        )


def _html(value: str, elem_id: str | None = None) -> gr.HTML:
    return gr.HTML(
        panel(value), elem_id=elem_id, js_on_load=(STATIC / "panel.js").read_text(encoding="utf-8"), padding=False
    )


def _nobody() -> Visit:
    """What a page shows before its visit is known."""
    return Visit("", Path(), AskSettings(model=""), Storage(Limits()))
