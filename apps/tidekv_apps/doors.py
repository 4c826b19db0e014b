"""Which of Gradio's routes this app opens, and to whom. What is not listed here does not exist.

Closed on purpose: the reverse proxy, links to other hosts, files by path, shared state links, media streams, custom
components, component functions, run history, monitoring, code editing, reload, MCP, and the second way to call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tidekv_apps.asgi import RefusedError, Scope

Kind = Literal[
    "open", "page", "health", "login", "upload", "progress", "join", "call", "cancel", "messages", "result", "heartbeat"
]


@dataclass(frozen=True)
class Door:
    """A route.

    Attributes:
        kind: who may pass and what is checked, see :class:`tidekv_apps.guard.Guard`.
        methods: HTTP methods.
        path: a regular expression for the whole path; its groups name ids.
    """

    kind: Kind
    methods: tuple[str, ...]
    path: re.Pattern[str]


def _door(kind: Kind, methods: str, path: str) -> Door:
    return Door(kind, tuple(methods.split()), re.compile(path + "/?"))


_API = "/gradio_api"
DOORS = (
    _door("page", "GET HEAD", ""),
    _door("page", "GET", "/config"),
    _door("health", "GET HEAD", "/health"),
    _door("login", "POST", "/login"),
    _door("open", "GET", "/logout"),
    _door("open", "GET", r"/(?:static|assets|svelte)/.+"),
    _door("open", "GET", r"/favicon\.ico|/robots\.txt|/manifest\.json|/pwa_icon(?:/[0-9]+)?|/theme\.css"),
    _door("open", "GET", rf"{_API}/(?:theme\.css|info|user|login_check|app_id|startup-events)"),
    _door("upload", "POST", rf"{_API}/upload"),
    _door("progress", "GET", rf"{_API}/upload_progress"),
    _door("join", "POST", rf"{_API}/queue/join"),
    _door("messages", "GET", rf"{_API}/queue/data"),
    _door("call", "POST", rf"{_API}/(?:call|run|api)/[^/]+"),
    _door("result", "GET", rf"{_API}/call/[^/]+/(?P<event>[^/]+)"),
    _door("cancel", "POST", rf"{_API}/cancel"),
    _door("open", "POST", rf"{_API}/reset"),
    _door("heartbeat", "GET", rf"{_API}/heartbeat/(?P<visit>[^/]+)"),
)


def find_door(scope: Scope) -> tuple[Door, dict[str, str]]:
    """The route of a request, and the ids in its path.

    Raises:
        RefusedError: there is none, or not with that method.
    """
    found = [(door, match) for door in DOORS if (match := door.path.fullmatch(scope["path"]))]
    if not found:
        raise RefusedError(404, "not here")
    for door, match in found:
        if scope["method"] in door.methods:
            return door, match.groupdict()
    raise RefusedError(405, f"{scope['method']} is not taken here")
