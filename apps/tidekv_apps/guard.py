"""The one way in: every request passes here before Gradio sees it, and only what is known goes on.

The order: a host that is ours, no page of another site, a route that is open, a login, an owner, and what that owner
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import parse_qs

from tidekv_apps.asgi import (
    App,
    Receive,
    RefusedError,
    Scope,
    Send,
    address_of,
    answer,
    refuse,
    whole_body,
    with_body,
    with_headers,
)
from tidekv_apps.doors import Kind, find_door
from tidekv_apps.inbox import Inbox
from tidekv_apps.logins import LoginDelays
from tidekv_apps.origin import check_host, check_site
from tidekv_apps.owners import OWNER_KEY, Binding, OwnerCookies, Visits, check_login
from tidekv_apps.presence import Presence
from tidekv_apps.security import HEADERS
from tidekv_apps.visits import VisitClosedError
from tidekv_llm.errors import BusyError

MAX_BODY_BYTES = 256 << 10
MAX_OPEN_REQUESTS = 400  # of one address: a browser tab keeps two open
_TOO_LONG = f"a request may have {MAX_BODY_BYTES >> 10} KiB; ask a shorter question"
_FOR_ALL: frozenset[Kind] = frozenset({"open", "page", "health", "login"})


class Guard:
    """ASGI middleware, outermost.

    Args:
        app: Gradio.
        hosts: host names that are answered; None for any (with a login).
        visits: who holds which sessions.
        inbox: where uploads go.
        health: says whether the app works, and what it does.
        presence: who listens to which events.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: Collection[str] | None,
        visits: Visits,
        inbox: Inbox,
        health: Callable[[], tuple[bool, dict[str, Any]]],
        presence: Presence,
    ) -> None:
        self._app, self._hosts, self._inbox, self._health = app, hosts, inbox, health
        self._cookies, self._logins = OwnerCookies(), LoginDelays()
        self._binding = Binding(app, visits, inbox.real_paths, presence)
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._counted(scope, receive, with_headers(send, HEADERS))
        else:  # Gradio has no WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal; count what an address has open."""
        address = address_of(scope)
        self._open[address] += 1
        try:
            if self._open[address] > MAX_OPEN_REQUESTS:
                raise RefusedError(429, "too many requests are open; try again in a minute", 60)
            await self._serve(scope, receive, send)
        except RefusedError as refused:
            await refuse(send, refused)
        except VisitClosedError as error:
            await refuse(send, RefusedError(403, str(error)))
        except BusyError as error:
            await refuse(send, RefusedError(503, str(error), 60))
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_site(scope, check_host(scope, self._hosts))
        door, ids = find_door(scope)
        owner = self._cookies.owner(scope)
        inside = _inside(scope, owner)
        if door.kind in ("page", "login") and not owner:
            send = with_headers(send, {"set-cookie": self._cookies.fresh()})
        if door.kind not in _FOR_ALL:
            check_login(scope)
            if not owner:
                raise RefusedError(403, "send the cookie that the page and /config set, so that nobody else is you")
        await self._pass(door.kind, ids, inside, receive, send)

    async def _pass(self, kind: Kind, ids: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        if kind == "health":
            well, facts = self._health()
            await answer(send, 200 if well else 503, facts)
        elif kind == "upload":
            await self._upload(scope, receive, send)
        elif kind == "progress":
            await self._inbox.tell_progress(scope[OWNER_KEY], _upload_id(scope), send)
        elif kind == "messages":
            await self._binding.messages(scope, receive, send)
        elif kind == "result":
            await self._binding.result(ids["event"], scope, receive, send)
        elif kind == "heartbeat":
            await self._binding.heartbeat(ids["visit"], scope, receive, send)
        elif scope["method"] == "POST":
            await self._post(kind, scope, await whole_body(receive, MAX_BODY_BYTES, _TOO_LONG), receive, send)
        else:
            await self._app(scope, receive, send)

    async def _post(self, kind: Kind, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        if kind == "login":
            await self._login(scope, body, receive, send)
        elif kind == "cancel":
            await self._binding.cancel(scope, body, receive, send)
        elif kind in ("join", "call"):
            await self._binding.call(scope, body, receive, send, named=kind == "join")
        else:
            await self._app(*with_body(scope, body, receive), send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = await self._inbox.take(scope[OWNER_KEY], address_of(scope), scope, receive, _upload_id(scope))
        await answer(send, 200, names)

    async def _login(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        address = address_of(scope)
        self._logins.begin(address)

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self._logins.succeeded(address)
            await send(message)

        await self._app(*with_body(scope, body, receive), watched)


def _inside(scope: Scope, owner: str) -> Scope:
    """The request as Gradio sees it: with its owner, and without what makes Gradio answer to other origins."""
    dropped = (b"origin", b"accept-encoding") if scope["method"] == "POST" else (b"origin",)
    return {**scope, OWNER_KEY: owner, "headers": [(k, v) for k, v in scope["headers"] if k not in dropped]}


def _upload_id(scope: Scope) -> str:
    return next(iter(parse_qs(scope["query_string"].decode("latin-1")).get("upload_id", [])), "")[:64]
