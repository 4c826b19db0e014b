"""One of each: models, queue, visits, and the threads beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tidekv_apps.asgi import address_of
from tidekv_apps.ask import Asker
from tidekv_apps.inbox import Inbox
from tidekv_apps.lanes import ReadingLanes
from tidekv_apps.models import Models
from tidekv_apps.owners import owner_of
from tidekv_apps.presence import Presence
from tidekv_apps.registry import Registry
from tidekv_apps.settings import AppOptions, AskSettings
from tidekv_apps.storage import Storage
from tidekv_apps.visits import Visit, VisitClosedError

if TYPE_CHECKING:
    import gradio as gr

Result = TypeVar("Result")


class Services:
    """One of each: models, queue, visits.

    Args:
        options: how the app was started.
        folder: the private folder for uploads and visits.
    """

    def __init__(self, options: AppOptions, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.uploads = folder / "uploads"
        self.inbox = Inbox(self.uploads, options.limits)
        self.presence = Presence(options.limits.listener_seconds)
        self.lanes, self.storage = ReadingLanes(options.limits), Storage(options.limits)
        self.registry = Registry(folder / "visits", options.limits, self._new_settings, self.storage)
        self.models = Models(options, before_unload=self.registry.drop_readers)
        self.asker = Asker(self.models, self.registry)
        self._threads = ThreadPoolExecutor(options.limits.visits, thread_name_prefix="tidekv-page")
        self._stopped = threading.Event()

    def _new_settings(self) -> AskSettings:
        return AskSettings(model=self.options.models[0])

    def start(self) -> None:
        """Load the first model and begin to look for idle visits."""
        self.models.start()
        threading.Thread(target=self._sweep, name="tidekv-sweep", daemon=True).start()

    def stop(self) -> None:
        """Free everything."""
        self._stopped.set()
        self.registry.close_all()
        self.models.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _sweep(self) -> None:
        while not self._stopped.wait(min(30.0, self.options.limits.idle_seconds)):
            self.registry.sweep()
            self.inbox.sweep()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether questions can be answered, and how many run or wait."""
        state = "failed" if self.models.error is not None else "ok" if self.models.ready.is_set() else "loading"
        return state == "ok", {"status": state, "questions": self.models.line.waiting}

    async def beside(self, visit: Visit, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run ``work`` in a thread, one piece at a time per visit.

        There are as many threads as visits, so that nobody's documents hold up another's page.
        """
        async with visit.turnstile:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def visit(self, request: gr.Request) -> Visit:
        """The caller's visit; nobody else's cookie opens it."""
        key, owner, address = identity(request)
        return self.registry.get(key, owner, address)


def identity(request: gr.Request) -> tuple[str, str, str]:
    """Visit key, owner and address of a Gradio request, as the guard found them."""
    if not request.session_hash or request.request is None:
        raise VisitClosedError("this request has no session; reload the page")
    scope = request.request.scope
    return request.session_hash, owner_of(scope), address_of(scope)
