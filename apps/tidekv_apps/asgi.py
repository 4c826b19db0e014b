"""The words of ASGI, and small things to do with a request before anyone else sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tidekv_llm.errors import TideKVError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SECONDS = 30.0  # longest silence inside a body


class RefusedError(TideKVError):
    """A request that gets no further.

    Args:
        status: of the HTTP response.
        reason: one line for the caller.
        retry_seconds: when to come again; None to say nothing about it.
    """

    def __init__(self, status: int, reason: str, retry_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_seconds = status, retry_seconds


def headers_of(scope: Scope, name: bytes) -> list[str]:
    """All values of a header, in order."""
    return [value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name]


def header(scope: Scope, name: bytes) -> str:
    """The first value of a header, or nothing."""
    return next(iter(headers_of(scope, name)), "")


def address_of(scope: Scope) -> str:
    """Where the request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else ""


async def answer(send: Send, status: int, data: object, headers: dict[str, str] | None = None) -> None:
    """A whole response in JSON."""
    body = json.dumps(data).encode()
    sent = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), value.encode()) for name, value in sent.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refused: RefusedError) -> None:
    """The response to a refused request; its connection ends, so that no rest of a body is taken for a request."""
    headers = {"connection": "close"}
    if refused.retry_seconds is not None:
        headers["retry-after"] = str(max(1, round(refused.retry_seconds)))
    await answer(send, refused.status, {"error": str(refused), "detail": str(refused)}, headers)


async def next_part(receive: Receive, seconds: float = BODY_SECONDS) -> tuple[bytes, bool]:
    """The next piece of a body, and whether there are more.

    Raises:
        RefusedError: nothing came for too long, or the client is gone.
    """
    try:
        message = await asyncio.wait_for(receive(), seconds)
    except TimeoutError:
        raise RefusedError(408, "the request stopped in the middle; send it again") from None
    if message["type"] != "http.request":
        raise RefusedError(400, "the request broke off")
    return message.get("body", b""), message.get("more_body", False)


async def whole_body(receive: Receive, limit: int, reason: str) -> bytes:
    """A body that must be small.

    Raises:
        RefusedError: it is longer than ``limit``, says ``reason``; or it does not come.
    """
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        part, more = await next_part(receive)
        size += len(part)
        if size > limit:
            raise RefusedError(413, reason)
        parts.append(part)
    return b"".join(parts)


def with_body(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """The request with another body; after it the client's own messages (that it left, say)."""
    kept = [(key, value) for key, value in scope["headers"] if key not in (b"content-length", b"transfer-encoding")]
    changed = {**scope, "headers": [*kept, (b"content-length", str(len(body)).encode())]}
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return changed, replay


def with_headers(send: Send, headers: dict[str, str]) -> Send:
    """Adds headers to the response."""
    added = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return adding


def noting_body(send: Send, note: Callable[[bytes], None], limit: int = 4096) -> Send:
    """Shows ``note`` the whole body of a short successful response before the client has it."""
    parts: list[bytes] = []
    good = False

    async def watching(message: Message) -> None:
        nonlocal good
        if message["type"] == "http.response.start":
            good = message["status"] == 200
        elif good and sum(map(len, parts)) < limit:
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                note(b"".join(parts))
        await send(message)

    return watching
