"""Where the app listens, what it answers, what it tells."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tidekv_apps import cli
from tidekv_apps.security import (
    MAX_BODY_BYTES,
    OwnerCookie,
    RequestChecks,
    SecurityHeaders,
    check_bind,
    parse_auth,
    plain_error,
    private_folder,
    safe_name,
)
from tidekv_apps.settings import Limits
from tidekv_llm.cli import main
from tidekv_llm.errors import ConfigError


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_addresses_that_others_reach_need_a_login(host: str) -> None:
    with pytest.raises(ConfigError, match="add --auth"):
        check_bind(host, None)
    check_bind(host, ("ida", "long enough"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_this_machine_needs_none(host: str) -> None:
    check_bind(host, None)


def test_the_command_refuses_an_open_address_with_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEKV_APP_AUTH", raising=False)
    assert main(["app", "--host", "0.0.0.0"]) == 2
    assert "add --auth" in capsys.readouterr().err
    assert main(["app", "--auth", "ida:short"]) == 2


def test_the_default_address_is_this_machine() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    assert parser.parse_args([]).host == "127.0.0.1"


def test_logins_are_a_name_and_a_long_password() -> None:
    assert parse_auth("ida:pass:word") == ("ida", "pass:word")
    assert parse_auth(None) is None
    for wrong in ("ida", ":password1", "ida:1234567"):
        with pytest.raises(ConfigError, match="USER:PASSWORD"):
            parse_auth(wrong)


def test_folders_and_later_files_are_private() -> None:
    before = os.umask(0o022)
    try:
        folder = private_folder()
        (folder / "uploads" / "file").write_text("x")
        for path in (folder, folder / "uploads", folder / "sessions", folder / "uploads" / "file"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    finally:
        os.umask(before)


def test_names_lose_folders_controls_and_direction_marks() -> None:
    assert safe_name("../../etc/passwd") == "passwd"
    assert safe_name("C:\\x\\evil\u202efdp.exe\n") == "evilfdp.exe"
    assert safe_name("...") == "document"
    assert len(safe_name("a" * 999 + ".pdf")) == 120


def test_unknown_errors_tell_no_path_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        text = plain_error(RuntimeError("/home/ida/secret.py line 3"))
    assert "secret" not in text and "RuntimeError" not in text
    assert "secret" in caplog.text  # the operator can find it by its reference
    assert plain_error(ConfigError("kept_tokens=1 is too small")) == "kept_tokens=1 is too small"


# --- middlewares ----------------------------------------------------------------------------------------


class Inner:
    """What comes after the middleware: says what it got."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while scope["method"] == "POST":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def call(
    app: Any, method: str, path: str, *parts: bytes, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str]]:
    sent: list[Any] = []
    waiting = [
        {"type": "http.request", "body": part, "more_body": at < len(parts) - 1}
        for at, part in enumerate(parts or (b"",))
    ]

    async def receive() -> Any:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in {"host": "127.0.0.1:1", **(headers or {})}.items()]
    asyncio.run(app({"type": "http", "method": method, "path": path, "headers": raw}, receive, send))
    if not sent:
        return 0, {}
    return sent[0]["status"], {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}


def checks(inner: Inner, folder: Path, **limits: Any) -> RequestChecks:
    return RequestChecks(inner, hosts=("127.0.0.1", "::1"), uploads=folder, limits=Limits(**limits))


JOIN = "/gradio_api/queue/join"


def test_every_answer_has_a_content_security_policy() -> None:
    _, headers = call(SecurityHeaders(Inner()), "GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "img-src 'self' data: blob:" in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_a_ten_megabyte_question_is_refused_before_anyone_reads_it(tmp_path: Path) -> None:
    inner, big = Inner(), b"x" * 10_000_000
    status, _ = call(checks(inner, tmp_path), "POST", JOIN, big, headers={"content-length": str(len(big))})
    assert status == 413
    status, _ = call(checks(inner, tmp_path), "POST", JOIN, *[big[:100_000]] * 50)  # no Content-Length
    assert status == 413
    assert inner.bodies == []


def test_small_requests_come_through_whole(tmp_path: Path) -> None:
    inner = Inner()
    assert call(checks(inner, tmp_path), "POST", JOIN, b'{"a":', b"1}")[0] == 200
    assert inner.bodies == [b'{"a":1}']
    assert MAX_BODY_BYTES >= 4 * 20_000  # a longest question in any script


@pytest.mark.parametrize("link", ["http://192.0.2.1/x.pdf", "HTTPS://x/y", " file:///etc/passwd", "ftp://x"])
def test_files_named_by_a_link_are_refused(tmp_path: Path, link: str) -> None:
    inner = Inner()
    body = json.dumps({"data": [[{"path": link, "meta": {"_type": "gradio.FileData"}}]]}).encode()
    assert call(checks(inner, tmp_path), "POST", JOIN, body)[0] == 400
    assert inner.bodies == []


def test_foreign_host_names_are_refused(tmp_path: Path) -> None:
    app = checks(Inner(), tmp_path)
    assert call(app, "GET", "/", headers={"host": "evil.example:7860"})[0] == 421
    assert call(app, "GET", "/", headers={"host": "[::1]:7860"})[0] == 200


@pytest.mark.parametrize("path", ["/gradio_api/proxy=http://192.0.2.1/", "/gradio_api/file=http://192.0.2.1/x"])
def test_gradios_ways_to_other_hosts_are_closed(tmp_path: Path, path: str) -> None:
    assert call(checks(Inner(), tmp_path), "GET", path)[0] == 404


def test_uploads_are_bounded_with_and_without_a_length(tmp_path: Path) -> None:
    inner, path = Inner(), "/gradio_api/upload"
    app = checks(inner, tmp_path, visit_bytes=1000)
    assert call(app, "POST", path, headers={"content-length": "9999999"})[0] == 413
    assert call(app, "POST", path, *[b"x" * 100_000] * 20)[0] == 0  # cut off
    assert inner.bodies == []
    (tmp_path / "old").write_bytes(b"x" * 500)
    full = checks(inner, tmp_path, upload_folder_bytes=400)
    assert call(full, "POST", path, b"x", headers={"content-length": "1"})[0] == 507


def test_every_browser_gets_a_secret_once() -> None:
    app = OwnerCookie(Inner())
    _, first = call(app, "GET", "/")
    _, second = call(app, "GET", "/")
    assert "HttpOnly" in first["set-cookie"] and "SameSite=Strict" in first["set-cookie"]
    assert first["set-cookie"] != second["set-cookie"]
    _, known = call(app, "GET", "/", headers={"cookie": first["set-cookie"].split(";")[0]})
    assert "set-cookie" not in known
