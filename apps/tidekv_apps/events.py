"""What the page does on every click, and what it shows afterwards.

Events run on the server's one event loop. Whatever grows with documents is done beside it, in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import gradio as gr

from tidekv_apps import handlers, panels
from tidekv_apps.figures import figures_panel
from tidekv_apps.jobs import Job
from tidekv_apps.security import plain_error
from tidekv_apps.services import Services, identity
from tidekv_apps.visits import Visit
from tidekv_llm.errors import TideKVError

PARTS = ("status", "documents", "budget", "conversation", "live", "notice", "figures", "viewer", "ask", "stop")
View = list[Any]
Views = AsyncIterator[View]


class PageEvents:
    """The handlers of the page's elements; each returns or yields what changes.

    Args:
        services: models, queue and visits.
    """

    def __init__(self, services: Services) -> None:
        self.services = services

    # --- views ------------------------------------------------------------------------------------------

    async def view(self, visit: Visit, question: str = "") -> View:
        """The whole page as it stands."""
        return await self.services.beside(visit, self._view, visit, question)

    def _view(self, visit: Visit, question: str) -> View:
        budget, ask = self._budget_view(visit, question)
        running = visit.job is not None and not visit.job.finished.is_set()
        return [
            handlers.status_line(self.services),
            panel(panels.documents_panel(visit, visit.reading)),
            budget,
            panel(panels.conversation_panel(visit)),
            panel(panels.live_panel(visit.job)),
            panel(panels.notice(visit.notice, "error")),
            panel(figures_panel(visit)),
            panel(visit.viewer or ""),
            ask,
            gr.update(interactive=running),
        ]

    def _budget_view(self, visit: Visit, question: str) -> View:
        """The budget bar and the Ask button."""
        budget = handlers.budget_of(self.services, visit, question)
        problem = handlers.problem_of(self.services, visit, budget)
        ready = handlers.can_ask(visit, budget, problem)
        return [panel(panels.budget_panel(budget, problem)), gr.update(interactive=ready)]

    async def _documents(self, visit: Visit) -> View:
        return only(documents=await self.services.beside(visit, _documents_now, visit))

    # --- the life of a page -----------------------------------------------------------------------------

    async def on_load(self, request: gr.Request) -> Views:
        """A tab was opened."""
        visit = self.services.visit(request)
        while not self.services.models.ready.is_set():
            yield only(status=handlers.status_line(self.services))
            await asyncio.sleep(0.5)
        yield await self.view(visit)

    def on_unload(self, request: gr.Request) -> None:
        """A tab was closed."""
        self.services.registry.close(*identity(request)[:2])

    async def on_clear(self, request: gr.Request) -> View:
        """New conversation."""
        visit = self.services.visit(request)
        await self.services.beside(visit, visit.clear)
        return await self.view(visit)

    # --- documents --------------------------------------------------------------------------------------

    async def on_upload(self, files: list[str] | None, request: gr.Request) -> Views:
        """Files have arrived."""
        visit = self.services.visit(request)
        try:
            async for _ in handlers.read_files(self.services, visit, files or []):
                yield [*await self._documents(visit), gr.skip()]
        except TideKVError as error:
            visit.notice = str(error)
        yield [*await self.view(visit), None]

    async def on_act(self, question: str, event: gr.EventData, request: gr.Request) -> Views:
        """A click inside one of the panels."""
        visit = self.services.visit(request)
        data = event._data if isinstance(event._data, dict) else {}
        name, argument, value = (str(data.get(key, ""))[:2000] for key in ("act", "arg", "value"))
        if name == "example":
            async for update in self._example(visit, argument, request):
                yield update
        elif name:
            try:
                async for update in self._act(visit, name, argument, value):
                    yield update
            except TideKVError as error:
                visit.notice = str(error)
            yield await self.view(visit, question)

    async def _act(self, visit: Visit, name: str, argument: str, value: str) -> Views:
        if name == "unlock":
            async for _ in handlers.unlock(self.services, visit, argument, value):
                yield await self._documents(visit)
        else:
            await self.services.beside(visit, handlers.act, self.services, visit, name, argument, value)

    async def _example(self, visit: Visit, argument: str, request: gr.Request) -> Views:
        """Read the sample document and ask the question of that number."""
        text = panels.EXAMPLES[int(argument) if argument.isdecimal() and int(argument) < len(panels.EXAMPLES) else 0]
        async for _ in handlers.read_sample(self.services, visit):
            yield await self._documents(visit)
        async for update in self.on_ask(text, request):
            yield update[:-1]

    # --- questions --------------------------------------------------------------------------------------

    async def on_ask(self, question: str, request: gr.Request) -> Views:
        """A question was asked."""
        visit = self.services.visit(request)
        try:
            job, _ = await self.services.beside(visit, self.services.asker.start, visit, question)
        except Exception as error:
            yield [*refusal(error), gr.skip()]
            return
        yield [*await self.view(visit), ""]
        async for update in self._follow(visit, job):
            yield [*update, gr.skip()]

    async def on_compare(self, schedule: str, request: gr.Request) -> Views:
        """Another schedule is run on the shown answer's prompt."""
        visit = self.services.visit(request)
        try:
            turn = visit.turn(visit.shown_turn)
            if turn is None:
                raise TideKVError("ask something first: the comparison runs the same prompt")
            job = await self.services.beside(visit, self.services.asker.compare, visit, turn, schedule)
        except Exception as error:
            yield refusal(error)
            return
        yield await self.view(visit)
        async for update in self._follow(visit, job):
            yield update

    async def _follow(self, visit: Visit, job: Job) -> Views:
        async for _ in handlers.changes(job):
            yield only(live=panel(panels.live_panel(job)))
        yield await self.view(visit)

    async def on_stop(self, request: gr.Request) -> View:
        """Stop was pressed."""
        self.services.visit(request).stop()
        return only(stop=gr.update(interactive=False))

    async def on_typing(self, question: str, request: gr.Request) -> View:
        """The question changes: its tokens are part of the budget."""
        visit = self.services.visit(request)
        return await self.services.beside(visit, self._budget_view, visit, question)

    # --- settings and export ----------------------------------------------------------------------------

    def on_settings(self, names: tuple[str, ...]) -> Callable[..., Awaitable[View]]:
        """The handler of the settings' elements, which have these names; the question is the last value."""

        async def apply(request: gr.Request, *values: Any) -> View:
            visit = self.services.visit(request)
            note = panels.notice("Applies to the next question.")
            try:
                handlers.change_settings(self.services, visit, dict(zip(names, values[:-1], strict=True)))
            except TideKVError as error:
                note = panels.notice(str(error), "error")
            return [note, *await self.services.beside(visit, self._budget_view, visit, values[-1])]

        return apply

    async def on_export_markdown(self, request: gr.Request) -> str:
        """The conversation to read."""
        return await self._export(request, "markdown")

    async def on_export_json(self, request: gr.Request) -> str:
        """The conversation with every figure."""
        return await self._export(request, "json")

    async def _export(self, request: gr.Request, kind: str) -> str:
        visit = self.services.visit(request)
        return await self.services.beside(visit, handlers.exported, visit, kind)


def panel(html: str) -> str:
    """A panel's content in the app's own style; nothing for nothing."""
    return f'<div class="tk">{html}</div>' if html else ""


def only(**values: Any) -> View:
    """Change some parts and leave the others."""
    return [values.get(name, gr.skip()) for name in PARTS]


def refusal(error: BaseException) -> View:
    """An error where the user looks: in the conversation."""
    return only(notice=panel(panels.notice(plain_error(error), "error")))


def _documents_now(visit: Visit) -> str:
    return panel(panels.documents_panel(visit, visit.reading))
