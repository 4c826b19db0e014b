"""Starts and stops the app: private folders, middlewares, Gradio without anything that leaves this machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any

from tidekv_apps.security import (
    OwnerCookie,
    RequestChecks,
    SecurityHeaders,
    check_bind,
    is_loopback,
    private_folder,
)
from tidekv_apps.settings import AppOptions

QUIET = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "GRADIO_SHARE": "False",
    "GRADIO_SSR_MODE": "False",
    "GRADIO_RUN_HISTORY": "False",
    "GRADIO_MCP_SERVER": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass
class Server:
    """A running app."""

    url: str
    services: Any
    blocks: Any

    def close(self) -> None:
        """Stop listening, free models and sessions, delete all files."""
        self.blocks.close(verbose=False)
        self.services.stop()
        shutil.rmtree(self.services.folder, ignore_errors=True)


def start(options: AppOptions, *, open_browser: bool = False) -> Server:
    """Start the app and return at once.

    Raises:
        ConfigError: an address that others can reach, without a login.
    """
    check_bind(options.host, options.auth)
    folder = private_folder()
    os.environ.update(QUIET, GRADIO_TEMP_DIR=str(folder / "uploads"))
    from starlette.middleware import Middleware

    from tidekv_apps.services import Services
    from tidekv_apps.ui import STATIC, THEME, WebPage

    services = Services(options, folder)
    page = WebPage(services)
    page.blocks.queue(max_size=200, default_concurrency_limit=None, api_open=False)
    hosts = LOCAL_HOSTS if is_loopback(options.host) else None
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
            "middleware": [
                Middleware(SecurityHeaders),
                Middleware(RequestChecks, hosts=hosts, uploads=services.uploads, limits=options.limits),
                Middleware(OwnerCookie),
            ],
        },
    )
    services.start()
    return Server(url, services, page.blocks)
