"""What keeps strangers out: headers, request checks, private folders, and rules about where to listen.

The middlewares are plain ASGI: they see every request before Gradio does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from tidekv_apps.settings import Limits
from tidekv_llm.errors import ConfigError, DocumentError, TideKVError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",  # Gradio's front end needs all three
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'self'",
        "object-src 'none'",
        "frame-ancestors 'self'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
OWNER_COOKIE = "tidekv_owner"
MAX_BODY_BYTES = 256 << 10
_UPLOAD_PATHS = ("/upload", "/gradio_api/upload")
# Gradio's own features that this app does not use: a reverse proxy, custom components, and shared state links.
_CLOSED_PATHS = ("/gradio_api/proxy=", "/proxy=", "/gradio_api/deep_link", "/deep_link", "/gradio_api/stream/")
_log = logging.getLogger("tidekv_apps")


# --- where to listen ------------------------------------------------------------------------------------


def check_bind(host: str, auth: tuple[str, str] | None) -> None:
    """Refuse an address that others can reach unless there is a login.

    Raises:
        ConfigError: such an address and no ``--auth``.
    """
    if auth is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached by others; add --auth USER:PASSWORD or $TIDEKV_APP_AUTH")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_auth(text: str | None) -> tuple[str, str] | None:
    """``user:password`` as a pair.

    Raises:
        ConfigError: no colon, no user, or a password below eight characters.
    """
    if not text:
        return None
    user, colon, password = text.partition(":")
    if not colon or not user or len(password) < 8:
        raise ConfigError("--auth must be USER:PASSWORD with a password of at least 8 characters")
    return user, password


# --- folders --------------------------------------------------------------------------------------------


def private_folder() -> Path:
    """A fresh folder that no other user can read, for uploads; also makes later files private."""
    os.umask(0o077)
    folder = Path(tempfile.mkdtemp(prefix="tidekv-app-"))
    folder.chmod(0o700)
    (folder / "uploads").mkdir(mode=0o700)
    (folder / "sessions").mkdir(mode=0o700)
    return folder


def check_upload_path(path: str, uploads: Path) -> Path:
    """The real path of an uploaded file, which must lie in the upload folder.

    Raises:
        DocumentError: it does not; the message does not tell whether such a file exists.
    """
    try:
        real = Path(path).resolve(strict=True)
        inside = real.is_file() and uploads.resolve() in real.parents
    except (OSError, ValueError, RuntimeError, TypeError):
        inside = False
    if not inside:
        raise DocumentError("that file was not uploaded here; choose it again")
    return real


def safe_name(name: str) -> str:
    """A file name to show: no folders, no control or direction characters, at most 120 characters."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    plain = "".join(c for c in last if c.isprintable() and c not in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2069")
    return (plain.strip(" .") or "document")[-120:]


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


# --- messages -------------------------------------------------------------------------------------------


def plain_error(error: BaseException) -> str:
    """What the user may read: our own one-line errors as they are, others without traceback or path."""
    if isinstance(error, TideKVError):
        return str(error)
    reference = secrets.token_hex(3)
    _log.error("internal error %s", reference, exc_info=error)
    return f"something went wrong here (reference {reference}); try again, and tell the operator if it stays"


# --- middlewares ----------------------------------------------------------------------------------------


class SecurityHeaders:
    """Adds the Content-Security-Policy and its companions to every response."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class OwnerCookie:
    """Gives every browser a secret of its own, so that a session id alone opens nothing."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/"
        if not wanted or OWNER_COOKIE in _header(scope, b"cookie"):
            await self._app(scope, receive, send)
            return

        async def with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{OWNER_COOKIE}={secrets.token_urlsafe(24)}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] = [*message.get("headers", ()), (b"set-cookie", cookie.encode())]
            await send(message)

        await self._app(scope, receive, with_cookie)


class RequestChecks:
    """Refuses foreign hosts, oversized bodies, full disks, links in place of files, and unused doors.

    Args:
        app: what comes after.
        hosts: host names that may be asked for; None for any (with a login).
        uploads: the upload folder.
        limits: sizes.
    """

    def __init__(self, app: App, *, hosts: Iterable[str] | None, uploads: Path, limits: Limits) -> None:
        self._app, self._uploads, self._limits = app, uploads, limits
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._is_upload(scope):
            await self._app(scope, _counted(receive, self._upload_limit()), send)
        else:
            await self._checked_body(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        path, host = scope["path"], _host_name(_header(scope, b"host"))
        if self._hosts is not None and host not in self._hosts:
            return 421, "this app answers to localhost only"
        if path.startswith(_CLOSED_PATHS) or "=http:" in path or "=https:" in path:
            return 404, "not here"
        if scope["method"] != "POST":
            return None
        length = _header(scope, b"content-length")
        size = int(length) if length.isdigit() else 0
        if self._is_upload(scope):
            if size > self._upload_limit():
                return 413, f"files of more than {self._limits.file_bytes >> 20} MiB are not taken"
            if folder_bytes(self._uploads) + size > self._limits.upload_folder_bytes:
                return 507, "the server's upload folder is full; try again later"
        elif size > MAX_BODY_BYTES:
            return 413, f"a request may have {MAX_BODY_BYTES >> 10} KiB; ask a shorter question"
        return None

    def _is_upload(self, scope: Scope) -> bool:
        return scope["path"].rstrip("/") in _UPLOAD_PATHS

    def _upload_limit(self) -> int:
        return self._limits.visit_bytes + MAX_BODY_BYTES

    async def _checked_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive, MAX_BODY_BYTES)
        if body is None:
            await _refuse(send, 413, f"a request may have {MAX_BODY_BYTES >> 10} KiB; ask a shorter question")
        elif _names_a_link(body):
            await _refuse(send, 400, "files are uploaded, not named by a link")
        else:
            await self._app(scope, _replayed(body, receive), send)


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name), "")


def _host_name(host: str) -> str:
    """``[::1]:7860`` and ``localhost:7860`` without the port."""
    return host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason, "detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None once it is longer than ``limit``."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _counted(receive: Receive, limit: int) -> Receive:
    """Ends a body that is longer than it may be, whatever its Content-Length said."""
    size = 0

    async def count() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        return {"type": "http.disconnect"} if size > limit else message

    return count


def _names_a_link(body: bytes) -> bool:
    """Whether a file in the request is a link: Gradio would fetch it, and this app asks no other host."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return False
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            path = value.get("path")
            if isinstance(path, str) and path.lower().lstrip().startswith(("http:", "https:", "ftp:", "file:")):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False
