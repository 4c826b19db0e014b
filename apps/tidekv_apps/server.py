"""Starts and stops the app: a private folder, the guard, Gradio without anything that leaves this machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tidekv_apps.security import check_bind, is_loopback
from tidekv_apps.settings import AppOptions
from tidekv_llm.lifetime import PrivateFolder

QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_ANALYTICS_MAX_EVENTS": "100",
    "GRADIO_SHARE": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_MCP_SERVER": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
FOLDER_PREFIX = "tidekv-app-"


@dataclass
class Server:
    """A running app."""

    url: str
    services: Any
    blocks: Any
    folder: PrivateFolder

    def close(self) -> None:
        """Stop listening, free models and visits, delete all files."""
        try:
            with suppress(Exception):  # whatever the web server says, users' files go
                self.blocks.close(verbose=False)
            self.services.stop()
        finally:
            self.folder.close()


def start(options: AppOptions, *, open_browser: bool = False) -> Server:
    """Start the app and return at once.

    Raises:
        ConfigError: an address that others can reach, without a login.
    """
    check_bind(options.host, options.auth)
    os.umask(0o077)  # what Gradio writes is private too
    folder = PrivateFolder(FOLDER_PREFIX)
    try:
        return _launch(options, folder, open_browser)
    except BaseException:
        folder.close()
        raise


def _launch(options: AppOptions, folder: PrivateFolder, open_browser: bool) -> Server:
    for name in ("uploads", "visits"):
        (folder.path / name).mkdir(mode=0o700)
    # A caller could write any address into X-Forwarded-For; behind a proxy the operator names the proxy here.
    os.environ.setdefault("FORWARDED_ALLOW_IPS", "")
    os.environ.update(QUIET, GRADIO_TEMP_DIR=str(folder.path / "uploads"))

    from tidekv_apps.services import Services
    from tidekv_apps.ui import STATIC, THEME, WebPage

    services = Services(options, folder.path)
    page = WebPage(services)
    page.blocks.queue(max_size=200, default_concurrency_limit=None, api_open=False)
    script = (STATIC / "app.js").read_text(encoding="utf-8")
    _, url, _ = page.blocks.launch(
        server_name=options.host,
        server_port=options.port,
        auth=[options.auth] if options.auth else None,
        prevent_thread_lock=True,
        quiet=True,
        inbrowser=open_browser,
        share=False,
        ssr_mode=False,
        run_history=False,
        mcp_server=False,
        enable_monitoring=False,
        show_error=False,
        footer_links=[],
        state_session_capacity=options.limits.visits,
        max_file_size=options.limits.file_bytes,
        theme=THEME,
        css_paths=STATIC / "style.css",
        head=f"<script>{script}</script>",
        app_kwargs={
            "docs_url": None,
            "redoc_url": None,
            "openapi_url": None,
            "lifespan": _guarded(options, services),
        },
    )
    services.start()
    return Server(url, services, page.blocks, folder)


def _guarded(options: AppOptions, services: Any) -> Any:
    """Puts the guard around everything. Middleware given to Gradio would stand behind Gradio's own."""
    from tidekv_apps.guard import Guard

    hosts = {*LOCAL_HOSTS, options.host.strip("[]")} if is_loopback(options.host) else None

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        app.middleware_stack = Guard(
            app.middleware_stack,
            hosts=hosts,
            visits=services.registry,
            inbox=services.inbox,
            health=services.health,
            presence=services.presence,
        )
        yield

    return lifespan
