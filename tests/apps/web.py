"""The app's HTTP side as a browser, an API client or a stranger sees it."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx

API = "/gradio_api"


class Caller:
    """One browser or API client.

    Args:
        url: of the app.
        cookie: whether it takes the cookie that it is given.
    """

    opened: ClassVar[list[Caller]] = []

    def __init__(self, url: str, *, cookie: bool = True) -> None:
        self.web = httpx.Client(base_url=url, timeout=60, verify=False)  # plain HTTP: no certificates to load
        self.opened.append(self)
        self.session = secrets.token_hex(8)
        if cookie:
            self.web.get("/config")

    @classmethod
    def close_all(cls) -> None:
        """End of a test."""
        while cls.opened:
            cls.opened.pop().web.close()

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.web.post(API + path, json=body, headers=headers)

    def begin(self, name: str, *data: Any, session: str | None = None) -> httpx.Response:
        """Begin an event of a named endpoint."""
        return self.post(f"/call/{name}", {"data": list(data), "session_hash": session or self.session})

    def result(self, name: str, event: str) -> httpx.Response:
        return self.web.get(f"{API}/call/{name}/{event}")

    def call(self, name: str, *data: Any, session: str | None = None) -> Any:
        """What a named endpoint returns; messages of earlier events of the session are passed over, as clients do."""
        begun = self.begin(name, *data, session=session)
        begun.raise_for_status()
        event, query = begun.json()["event_id"], {"session_hash": session or self.session}
        with self.web.stream("GET", f"{API}/queue/data", params=query) as stream:
            for line in stream.iter_lines():
                message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
                if message.get("event_id") == event and message["msg"] == "process_completed":
                    assert message["success"], message["output"]
                    return message["output"]["data"][0]
        raise AssertionError(f"{name} ended without an answer")

    def upload(self, *files: tuple[str, bytes], **headers: str) -> httpx.Response:
        return self.web.post(f"{API}/upload", files=[("files", file) for file in files], headers=headers)

    def add(self, *files: tuple[str, bytes], session: str | None = None) -> dict[str, Any]:
        """Upload files and add them to the conversation."""
        sent = self.upload(*files)
        sent.raise_for_status()
        named = [{"path": name, "meta": {"_type": "gradio.FileData"}} for name in sent.json()]
        added: dict[str, Any] = self.call("add_documents", named, "", session=session)
        return added

    def documents(self) -> list[str]:
        return [entry["name"] for entry in self.call("documents")["documents"]]


class Line:
    """A bare connection: requests that no proper client sends, one piece at a time."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").rstrip("/").split(":")
        self.host = f"{host}:{port}"
        self.socket = socket.create_connection((host, int(port)), timeout=60)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def status(self) -> int:
        """The status of the answer; 0 if the server just ended the connection."""
        head = self._read_to(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0

    def body(self) -> bytes:
        """The answer's JSON, after :meth:`status`."""
        return self._read_to(b"]")

    def _read_to(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            try:
                piece = self.socket.recv(1)
            except ConnectionError:
                piece = b""
            if not piece:
                return b""
            data += piece
        return data

    def close(self) -> None:
        self.socket.close()

    def begin_upload(self, caller: Caller, name: str, data: bytes, upload_id: str = "") -> None:
        """The head of a chunked upload and the first bytes of its file; it goes on with :meth:`chunk`."""
        cookies = "; ".join(f"{key}={value}" for key, value in caller.web.cookies.items())
        head = [
            f"POST {API}/upload?upload_id={upload_id} HTTP/1.1",
            f"Host: {self.host}",
            f"Cookie: {cookies}",
            "Content-Type: multipart/form-data; boundary=b",
            "Transfer-Encoding: chunked",
        ]
        part = f'--b\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        self.send("\r\n".join([*head, "", ""]).encode())
        self.chunk(part.encode() + data)

    def chunk(self, data: bytes) -> None:
        self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def end_upload(self) -> int:
        self.chunk(b"\r\n--b--\r\n")
        self.send(b"0\r\n\r\n")
        return self.status()


def until(condition: Callable[[], Any], seconds: float = 120) -> bool:
    """Wait for something to become true; generous, since the machine may be busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def uploaded(folder: Path) -> list[Path]:
    """Files and folders that uploads of an app started in ``folder`` have left; one empty folder is Gradio's own."""
    return [path for path in folder.glob("tidekv-app-*/uploads/**/*") if path.name != "vibe_edit_history"]


def stored(folder: Path) -> list[Path]:
    """The same, and the documents of visits."""
    return uploaded(folder) + list(folder.glob("tidekv-app-*/visits/*/*"))
