"""The page: three zones, and which handler each element calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr

from tidekv_apps import export, handlers, panels
from tidekv_apps.files import Files
from tidekv_apps.handlers import Services
from tidekv_apps.jobs import Job
from tidekv_apps.security import plain_error
from tidekv_apps.settings import MAX_QUESTION_CHARACTERS, AskSettings
from tidekv_apps.visits import Visit
from tidekv_llm.compress.budgets import HEAD_BUDGETS, LAYER_BUDGETS
from tidekv_llm.compress.selectors import selector_names
from tidekv_llm.errors import TideKVError
from tidekv_llm.schedules import schedule_names

STATIC = Path(__file__).parent / "static"
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
PUBLIC: dict[str, Any] = {"api_visibility": "public", "show_progress": "hidden", "concurrency_limit": None}
THEME = gr.themes.Base(
    primary_hue="teal",
    neutral_hue="gray",
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
)


class Page:
    """Builds the Blocks and holds the components that handlers change."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.blocks = gr.Blocks(title="TideKV", delete_cache=(600, 3600), analytics_enabled=False, fill_width=True)
        with self.blocks:
            _html(
                '<div class="tk-inline"><h1>TideKV</h1><button type="button" class="link" data-theme-toggle>'
                "Light or dark</button></div>",
                "tk-head",
            )
            with gr.Row(elem_id="tk-zones"):
                with gr.Column(elem_id="tk-documents"):
                    self._documents()
                with gr.Column(elem_id="tk-talk"):
                    self._talk()
                with gr.Column(elem_id="tk-figures"):
                    self._figures()
            self.viewer = _html("", "tk-viewer")
            self._api_parts()
            self._wire()
            self._wire_settings()
            self._wire_api()

    # --- zones ------------------------------------------------------------------------------------------

    def _documents(self) -> None:
        _html("<h2>Documents</h2>")
        self.status = _html("", "tk-status")
        self.files = Files(
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
            "schedule": gr.Dropdown(list(schedule_names()), value=first.schedule, label="Schedule"),
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
            self.conversation = _html(panels.conversation(_nobody()), "tk-conversation")
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
        self.figures = _html(panels.figures_panel(_nobody()), "tk-figures-panel")
        with gr.Accordion("Compare with a real run", open=False, elem_id="tk-compare"):
            others = [name for name in schedule_names() if name != "tidekv"]
            self.schedule = gr.Dropdown(others, value=others[0], label="Schedule, same prompt, to the first token")
            self.compare = gr.Button("Run it", size="sm", elem_id="tk-compare-run")

    def _api_parts(self) -> None:
        """Elements that nobody sees: they type the named endpoints."""
        with gr.Column(visible=False):
            self.api_files = Files(file_count="multiple", label="files")
            self.api_password = gr.Textbox("", label="password")
            self.api_question = gr.Textbox("", label="question")
            self.api_settings = gr.JSON({}, label="settings")
            self.api_kind = gr.Textbox("json", label="kind")
            self.api_out = gr.JSON(label="result")
            self.api_text = gr.Textbox(label="text")
            self.api_run = gr.Button()

    # --- views ------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> list[Any]:
        """What :meth:`view` fills."""
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

    def view(self, visit: Visit, question: str = "") -> list[Any]:
        """The whole page as it stands."""
        budget = handlers.budget_of(self.services, visit, question)
        problem = handlers.problem_of(self.services, visit, budget)
        running = visit.job is not None and not visit.job.finished.is_set()
        viewer = visit.viewer["html"] if visit.viewer else ""
        return [
            handlers.status_line(self.services),
            _panel(panels.documents_panel(visit, visit.reading)),
            _panel(panels.budget_panel(budget, problem)),
            _panel(panels.conversation(visit)),
            _panel(panels.live_panel(visit.job)),
            _panel(panels.notice(visit.notice, "error")),
            _panel(panels.figures_panel(visit)),
            _panel(viewer),
            gr.update(interactive=handlers.can_ask(visit, budget, problem)),
            gr.update(interactive=running),
        ]

    def only(self, **values: Any) -> list[Any]:
        """Change some outputs and leave the others."""
        names = ("status", "documents", "budget", "conversation", "live", "notice", "figures", "viewer", "ask", "stop")
        return [values.get(name, gr.skip()) for name in names]

    def refusal(self, error: BaseException) -> list[Any]:
        """An error where the user looks: in the conversation."""
        return self.only(notice=_panel(panels.notice(plain_error(error), "error")))

    # --- events -----------------------------------------------------------------------------------------

    def _wire(self) -> None:
        outputs = self.outputs
        self.blocks.load(self._on_load, None, outputs, **PRIVATE)
        self.blocks.unload(self._on_unload)
        self.files.upload(self._on_upload, [self.files], [*outputs, self.files], **PRIVATE)
        for panel in (self.documents, self.conversation, self.figures, self.viewer):
            panel.click(self._on_act, [self.question], outputs, **PRIVATE)
        for trigger in (self.ask.click, self.question.submit):
            trigger(self._on_ask, [self.question], [*outputs, self.question], **PRIVATE)
        self.stop.click(self._on_stop, None, outputs, queue=False, **PRIVATE)
        self.clear.click(self._on_clear, None, outputs, **PRIVATE)
        self.compare.click(self._on_compare, [self.schedule], outputs, **PRIVATE)
        self.question.change(
            self._on_typing,
            [self.question],
            [self.budget, self.ask],
            trigger_mode="always_last",
            **PRIVATE,
        )
        for button, kind, name, mime in (
            (self.save_markdown, "markdown", "tidekv.md", "text/markdown"),
            (self.save_json, "json", "tidekv.json", "application/json"),
        ):
            button.click(_exporter(self, kind), None, self.api_text, **PRIVATE).then(
                None, self.api_text, None, js=f"(text) => window.tidekvSave(text, '{name}', '{mime}')"
            )

    def _wire_settings(self) -> None:
        fields = {**self.settings, "retrieval": self.retrieval}

        def apply(request: gr.Request, *values: Any) -> list[Any]:
            visit = self.services.visit(request)
            note = "Applies to the next question."
            try:
                handlers.change_settings(self.services, visit, dict(zip(fields, values[:-1], strict=True)))
            except TideKVError as error:
                return [panels.notice(str(error), "error"), *self._budget_view(visit, values[-1])]
            return [panels.notice(note), *self._budget_view(visit, values[-1])]

        gr.on(
            # A Textbox tells of typing by "change" only; nothing but the user changes these.
            [field.change if isinstance(field, gr.Textbox) else field.input for field in fields.values()],
            apply,
            [*fields.values(), self.question],
            [self.settings_note, self.budget, self.ask],
            trigger_mode="always_last",
            **PRIVATE,
        )

    def _budget_view(self, visit: Visit, question: str) -> list[Any]:
        budget = handlers.budget_of(self.services, visit, question)
        problem = handlers.problem_of(self.services, visit, budget)
        ready = handlers.can_ask(visit, budget, problem)
        return [_panel(panels.budget_panel(budget, problem)), gr.update(interactive=ready)]

    async def _on_load(self, request: gr.Request) -> AsyncIterator[list[Any]]:
        visit = self.services.visit(request)
        while not self.services.pool.ready.is_set():
            yield self.only(status=handlers.status_line(self.services))
            await asyncio.sleep(0.5)
        yield self.view(visit)

    def _on_unload(self, request: gr.Request) -> None:
        self.services.registry.close(*handlers.identity(request)[:2])

    async def _on_upload(self, files: list[str] | None, request: gr.Request) -> AsyncIterator[list[Any]]:
        visit = self.services.visit(request)
        try:
            async for _ in handlers.read_files(self.services, visit, files or []):
                yield [*self.only(documents=_panel(panels.documents_panel(visit, visit.reading))), gr.skip()]
        except TideKVError as error:
            visit.notice = str(error)
        yield [*self.view(visit), None]

    async def _on_act(self, question: str, event: gr.EventData, request: gr.Request) -> AsyncIterator[list[Any]]:
        visit = self.services.visit(request)
        data = event._data if isinstance(event._data, dict) else {}
        name, argument, value = (str(data.get(key, ""))[:2000] for key in ("act", "arg", "value"))
        if not name:
            yield self.only()
            return
        try:
            if name == "example":
                async for update in self._example(visit, argument, request):
                    yield update
                return
            if name == "unlock":
                async for _ in handlers.unlock(self.services, visit, argument, value):
                    yield self.only(documents=_panel(panels.documents_panel(visit, visit.reading)))
            else:
                await asyncio.to_thread(handlers.act, self.services, visit, name, argument, value)
        except TideKVError as error:
            visit.notice = str(error)
        yield self.view(visit, question)

    async def _on_ask(self, question: str, request: gr.Request) -> AsyncIterator[list[Any]]:
        visit = self.services.visit(request)
        try:
            job, _ = await asyncio.to_thread(self.services.asker.start, visit, question)
        except Exception as error:
            yield [*self.refusal(error), gr.skip()]
            return
        yield [*self.view(visit), ""]
        async for update in self._follow(visit, job):
            yield [*update, gr.skip()]

    async def _follow(self, visit: Visit, job: Job) -> AsyncIterator[list[Any]]:
        async for _ in handlers.changes(job):
            yield self.only(live=_panel(panels.live_panel(job)))
        yield self.view(visit)

    async def _example(self, visit: Visit, argument: str, request: gr.Request) -> AsyncIterator[list[Any]]:
        """Read the sample document and ask the question of that number."""
        text = panels.EXAMPLES[int(argument) if argument.isdecimal() and int(argument) < len(panels.EXAMPLES) else 0]
        async for _ in handlers.read_sample(self.services, visit):
            yield self.only(documents=_panel(panels.documents_panel(visit, visit.reading)))
        async for update in self._on_ask(text, request):
            yield update[:-1]

    def _on_stop(self, request: gr.Request) -> list[Any]:
        visit = self.services.visit(request)
        visit.stop()
        return self.only(stop=gr.update(interactive=False))

    def _on_clear(self, request: gr.Request) -> list[Any]:
        visit = self.services.visit(request)
        visit.clear()
        return self.view(visit)

    async def _on_compare(self, schedule: str, request: gr.Request) -> AsyncIterator[list[Any]]:
        visit = self.services.visit(request)
        try:
            turn = visit.turn(visit.shown_turn)
            if turn is None:
                raise TideKVError("ask something first: the comparison runs the same prompt")
            job = await asyncio.to_thread(self.services.asker.compare, visit, turn, schedule)
        except Exception as error:
            yield self.refusal(error)
            return
        yield self.view(visit)
        async for update in self._follow(visit, job):
            yield update

    def _on_typing(self, question: str, request: gr.Request) -> list[Any]:
        return self._budget_view(self.services.visit(request), question)

    # --- named endpoints --------------------------------------------------------------------------------

    def _wire_api(self) -> None:
        click = self.api_run.click
        click(self._api_add, [self.api_files, self.api_password], self.api_out, api_name="add_documents", **PUBLIC)
        click(self._api_ask, self.api_question, self.api_out, api_name="ask", **PUBLIC)
        click(self._api_settings, self.api_settings, self.api_out, api_name="settings", **PUBLIC)
        click(self._api_documents, None, self.api_out, api_name="documents", **PUBLIC)
        click(self._api_export, self.api_kind, self.api_text, api_name="export", **PUBLIC)
        click(self._api_stop, None, self.api_out, api_name="stop", queue=False, **PUBLIC)
        click(self._api_clear, None, self.api_out, api_name="clear", **PUBLIC)

    async def _api_add(self, files: list[str] | None, password: str, request: gr.Request) -> dict[str, Any]:
        visit = self._caller(request)
        try:
            async for _ in handlers.read_files(self.services, visit, files or []):
                pass
            for entry in [entry for entry in visit.entries if entry.state == "locked" and password]:
                async for _ in handlers.unlock(self.services, visit, entry.key, password):
                    pass
        except Exception as error:
            raise _refused(error) from None
        if visit.notice:
            raise gr.Error(visit.notice)
        return self._listing(visit)

    async def _api_ask(self, question: str, request: gr.Request) -> dict[str, Any]:
        visit = self._caller(request)
        try:
            job, turn = await asyncio.to_thread(self.services.asker.start, visit, question)
        except Exception as error:
            raise _refused(error) from None
        async for _ in handlers.changes(job):
            pass
        if turn.state != "done":
            raise gr.Error(turn.error or "stopped")
        return export.turn_as_dict(turn)

    def _api_settings(self, changes: dict[str, Any] | None, request: gr.Request) -> dict[str, Any]:
        visit = self._caller(request)
        try:
            handlers.change_settings(self.services, visit, changes or {})
        except Exception as error:
            raise _refused(error) from None
        return vars(visit.settings)

    def _api_documents(self, request: gr.Request) -> dict[str, Any]:
        return self._listing(self._caller(request))

    def _api_export(self, kind: str, request: gr.Request) -> str:
        try:
            return handlers.exported(self._caller(request), kind)
        except TideKVError as error:
            raise _refused(error) from None

    def _api_stop(self, request: gr.Request) -> dict[str, Any]:
        self._caller(request).stop()
        return {"stopped": True}

    def _api_clear(self, request: gr.Request) -> dict[str, Any]:
        visit = self._caller(request)
        visit.clear()
        return self._listing(visit)

    def _caller(self, request: gr.Request) -> Visit:
        try:
            return self.services.visit(request)
        except TideKVError as error:
            raise _refused(error) from None

    def _listing(self, visit: Visit) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(export.as_json(visit))
        budget = handlers.budget_of(self.services, visit)
        tokens = None if budget is None else {"total": budget.total, "limit": budget.limit, "fits": budget.fits}
        return {"documents": data["documents"], "budget": tokens, "warnings": _left_out(visit)}


def _left_out(visit: Visit) -> list[str]:
    return [f"{entry.name}: {line}" for entry in visit.entries if (line := panels.excluded(entry))]


def _refused(error: BaseException) -> gr.Error:
    return gr.Error(plain_error(error), print_exception=False)


def _html(value: str, elem_id: str | None = None) -> gr.HTML:
    return gr.HTML(
        _panel(value), elem_id=elem_id, js_on_load=(STATIC / "panel.js").read_text(encoding="utf-8"), padding=False
    )


def _panel(html: str) -> str:
    return f'<div class="tk">{html}</div>' if html else ""


def _nobody() -> Visit:
    """What a page shows before its visit is known."""
    return Visit("", Path(), AskSettings(model=""))


def _exporter(page: Page, kind: str) -> Any:
    def run(request: gr.Request) -> str:
        return handlers.exported(page.services.visit(request), kind)

    return run
