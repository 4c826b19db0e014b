"""The named endpoints: what ``gradio_client`` and scripts can do."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import gradio as gr
from gradio.context import LocalContext

from tidekv_apps import export, handlers, panels
from tidekv_apps.files import file_drop
from tidekv_apps.security import plain_error
from tidekv_apps.services import Services
from tidekv_apps.visits import Visit

PUBLIC: dict[str, Any] = {"api_visibility": "public", "show_progress": "hidden", "concurrency_limit": None}
Json = dict[str, Any]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Endpoints:
    """Everything of the page as calls without a page.

    Args:
        services: models, queue and visits.
    """

    def __init__(self, services: Services) -> None:
        self.services = services

    def wire(self) -> None:
        """Make the endpoints, inside a Blocks; the elements, which nobody sees, say their types."""
        files = file_drop(file_count="multiple", label="files")
        password = gr.Textbox("", label="password")
        question = gr.Textbox("", label="question")
        settings = gr.JSON({}, label="settings")
        kind = gr.Textbox("json", label="kind")
        out, text = gr.JSON(label="result"), gr.Textbox(label="text")
        click = gr.Button().click
        click(_told(self.add_documents), [files, password], out, api_name="add_documents", **PUBLIC)
        click(_told(self.ask), question, out, api_name="ask", **PUBLIC)
        click(_told(self.settings), settings, out, api_name="settings", **PUBLIC)
        click(_told(self.documents), None, out, api_name="documents", **PUBLIC)
        click(_told(self.export), kind, text, api_name="export", **PUBLIC)
        click(_told(self.stop), None, out, api_name="stop", queue=False, **PUBLIC)
        click(_told(self.clear), None, out, api_name="clear", **PUBLIC)

    async def add_documents(self, files: list[str] | None, password: str, request: gr.Request) -> Json:
        """Read files, with a password for those that are locked."""
        visit = self.services.visit(request)
        async for _ in handlers.read_files(self.services, visit, files or [], self._gone(request)):
            pass
        for entry in [entry for entry in visit.entries if entry.state == "locked" and password]:
            async for _ in handlers.unlock(self.services, visit, entry.key, password):
                pass
        if visit.notice:
            raise gr.Error(visit.notice, print_exception=False)
        return await self.services.beside(visit, self._listing, visit)

    async def ask(self, question: str, request: gr.Request) -> Json:
        """Answer a question."""
        visit = self.services.visit(request)
        job, turn = await self.services.beside(visit, self.services.asker.start, visit, question)
        async for _ in handlers.changes(job, self._gone(request)):
            pass
        if turn.state != "done":
            raise gr.Error(turn.error or "stopped", print_exception=False)
        return await self.services.beside(visit, export.turn_as_dict, turn)

    async def settings(self, changes: Json | None, request: gr.Request) -> Json:
        """Change settings; returns all of them."""
        visit = self.services.visit(request)
        handlers.change_settings(self.services, visit, changes or {})
        return vars(visit.settings)

    async def documents(self, request: gr.Request) -> Json:
        """The files, the budget, and the pages that are left out."""
        visit = self.services.visit(request)
        return await self.services.beside(visit, self._listing, visit)

    async def export(self, kind: str, request: gr.Request) -> str:
        """The conversation as ``markdown`` or ``json``."""
        visit = self.services.visit(request)
        return await self.services.beside(visit, handlers.exported, visit, kind)

    async def stop(self, request: gr.Request) -> Json:
        """Stop what runs."""
        self.services.visit(request).stop()
        return {"stopped": True}

    async def clear(self, request: gr.Request) -> Json:
        """Forget documents and conversation."""
        visit = self.services.visit(request)
        await self.services.beside(visit, visit.clear)
        return await self.services.beside(visit, self._listing, visit)

    def _gone(self, request: gr.Request) -> Callable[[], bool]:
        """Whether nobody waits for this event's result, alone or with all of its session."""
        return self.services.presence.watch(LocalContext.event_id.get(None) or "", request.session_hash or "")

    def _listing(self, visit: Visit) -> Json:
        data: Json = json.loads(export.as_json(visit))
        budget = handlers.budget_of(self.services, visit)
        tokens = None if budget is None else {"total": budget.total, "limit": budget.limit, "fits": budget.fits}
        warnings = [f"{entry.name}: {line}" for entry in visit.entries if (line := panels.left_out(entry))]
        return {"documents": data["documents"], "budget": tokens, "warnings": warnings}


def _told(endpoint: Callable[Arguments, Awaitable[Result]]) -> Callable[Arguments, Awaitable[Result]]:
    """The endpoint with errors that the caller may read."""

    @functools.wraps(endpoint)
    async def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return await endpoint(*args, **kwargs)
        except gr.Error:
            raise
        except Exception as error:
            raise gr.Error(plain_error(error), print_exception=False) from None

    return call
