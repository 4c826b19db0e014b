"""Whose request it is: every browser and every API client has a signed secret of its own.

A session id or an event id alone opens nothing. Both are bound to the owner here, for every route that uses them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import parse_qs

from tidekv_apps.asgi import App, Receive, RefusedError, Scope, Send, address_of, header, noting_body, with_body
from tidekv_apps.presence import Presence

OWNER_COOKIE = "tidekv_owner"
OWNER_KEY = "tidekv_owner"  # in the ASGI scope
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What Gradio takes from a caller besides (flags for its own use, tokens of other services) is not passed on.
_FIELDS = frozenset({"data", "event_data", "fn_index", "trigger_id", "session_hash"})
_CANCEL_FIELDS = frozenset({"session_hash", "fn_index", "event_id"})


class Visits(Protocol):
    """Who holds which session id and which event ids."""

    def get(self, key: str, owner: str, address: str) -> object:
        """Take a session id for the owner, or find that it is theirs.

        Raises:
            VisitClosedError: it is another's.
            BusyError: there are too many.
        """

    def owns(self, key: str, owner: str) -> bool:
        """Whether the owner has that session."""

    def owns_event(self, event: str, owner: str) -> bool:
        """Whether a session of the owner began that event."""

    def note_event(self, key: str, event: str) -> None:
        """An event was begun in a session."""


class OwnerCookies:
    """Makes and checks the secret of a browser; forged ones are as good as none."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def owner(self, scope: Scope) -> str:
        """The owner of a request, or nothing."""
        sent = (part.strip().partition("=") for part in header(scope, b"cookie").split(";"))
        values = (value for name, _, value in sent if name == OWNER_COOKIE)
        return next((owner for value in values if (owner := self._checked(value))), "")

    def fresh(self) -> str:
        """A ``Set-Cookie`` value for someone new."""
        owner = secrets.token_urlsafe(24)
        return f"{OWNER_COOKIE}={owner}.{self._sign(owner)}; HttpOnly; SameSite=Strict; Path=/"

    def _checked(self, value: str) -> str:
        owner, _, signature = value.partition(".")
        return owner if owner and hmac.compare_digest(signature.encode(), self._sign(owner).encode()) else ""

    def _sign(self, owner: str) -> str:
        return hmac.new(self._key, owner.encode(), hashlib.sha256).hexdigest()[:32]


def owner_of(scope: Scope) -> str:
    """The owner as :class:`tidekv_apps.guard.Guard` found it."""
    return str(scope.get(OWNER_KEY, ""))


def check_login(scope: Scope) -> None:
    """Some of Gradio's routes work without a login; none here does.

    Raises:
        RefusedError: the app asks for a login and the caller has none.
    """
    app = scope["app"]
    if app.auth is None:
        return
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    sent = (part.strip().partition("=") for part in header(scope, b"cookie").split(";"))
    if not any(name in names and value in app.tokens for name, _, value in sent):
        raise RefusedError(401, "log in first")


class Binding:
    """Passes on what belongs to the caller.

    Args:
        app: what comes after.
        visits: who holds what.
        real_paths: puts the paths of the caller's own uploads where a request names them.
        presence: told who listens.
    """

    def __init__(self, app: App, visits: Visits, real_paths: Callable[[str, Any], Any], presence: Presence) -> None:
        self._app, self._visits, self._real_paths, self._presence = app, visits, real_paths, presence

    async def call(self, scope: Scope, body: bytes, receive: Receive, send: Send, *, named: bool) -> None:
        """Begin an event: in the caller's session, or in a new one if the request names none and ``named`` is false."""
        owner, sent = owner_of(scope), _fields(body, _FIELDS)
        if scope["path"].rstrip("/").endswith("/add_documents"):
            _check_files(sent.get("data"))
        key = _id(sent.get("session_hash")) if named or sent.get("session_hash") else secrets.token_hex(16)
        self._visits.get(key, owner, address_of(scope))
        changed = {name: self._real_paths(owner, value) for name, value in sent.items()} | {"session_hash": key}

        def note(answer: bytes) -> None:
            self._visits.note_event(key, _event_in(answer))

        await self._pass(scope, changed, receive, noting_body(send, note))

    async def cancel(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Stop an event of the caller."""
        owner, sent = owner_of(scope), _fields(body, _CANCEL_FIELDS)
        self._check(self._visits.owns(_id(sent.get("session_hash")), owner))
        self._check(self._visits.owns_event(_id(sent.get("event_id")), owner))
        await self._pass(scope, sent, receive, send)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the events of a session say."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        key = _id(next(iter(query.get("session_hash", [])), None))
        self._check(self._visits.owns(key, owner_of(scope)) and len(query["session_hash"]) == 1)
        with self._presence.listening(key):
            await self._app(scope, receive, send)

    async def result(self, event: str, scope: Scope, receive: Receive, send: Send) -> None:
        """What one event says."""
        self._check(self._visits.owns_event(_id(event), owner_of(scope)))
        with self._presence.listening(event):
            await self._app(scope, receive, send)

    async def heartbeat(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        """The sign of life whose end closes the session."""
        self._visits.get(_id(key), owner_of(scope), address_of(scope))
        await self._app(scope, receive, send)

    async def _pass(self, scope: Scope, data: dict[str, Any], receive: Receive, send: Send) -> None:
        await self._app(*with_body(scope, json.dumps(data).encode(), receive), send)

    def _check(self, allowed: bool) -> None:
        if not allowed:
            raise RefusedError(403, "that belongs to another browser; reload the page")


def _fields(body: bytes, names: frozenset[str]) -> dict[str, Any]:
    """The fields of a JSON object that are meant for Gradio."""
    try:
        sent = json.loads(body)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the request is no JSON") from None
    if not isinstance(sent, dict):
        raise RefusedError(400, "the request must be a JSON object")
    return {name: value for name, value in sent.items() if name in names}


def _check_files(data: object) -> None:
    """Files come as a list of what an upload named; anything else would fail inside Gradio, with no word of why."""
    files = data[0] if isinstance(data, list) and data else None
    if not isinstance(files, list) or not all(isinstance(file, dict) and "path" in file for file in files):
        raise RefusedError(400, "that file was not uploaded here; choose it again")


def _id(value: object) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise RefusedError(400, "the request names no session; reload the page")
    return value


def _event_in(answer: bytes) -> str:
    try:
        event = json.loads(answer).get("event_id")
    except (ValueError, AttributeError):
        return ""
    return event if isinstance(event, str) else ""
