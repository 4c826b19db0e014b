"""Host names and origins are compared as a whole, and pages of other sites change nothing."""

from __future__ import annotations

import httpx
import pytest

from tests.apps.conftest import Running
from tests.apps.web import API, Caller, Line
from tidekv_apps.origin import Place, parse_host, parse_origin

FOREIGN = ["https://evil.example", "http://localhost:1", "http://127.0.0.1:1", "null", "http://127.0.0.1:{port}.evil"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("localhost:7860", Place("localhost", 7860)),
        ("LOCALHOST", Place("localhost", None)),
        ("[0:0:0:0:0:0:0:1]:80", Place("::1", 80)),
        ("[::1]evil", None),
        ("[::1", None),
        ("localhost:evil", None),
        ("localhost:78600000", None),
        ("user@localhost", None),
        ("localhost/x", None),
        ("localhost\n", None),
        ("", None),
    ],
)
def test_a_host_is_parsed_or_refused(text: str, place: Place | None) -> None:
    assert parse_host(text) == place


def test_an_origin_has_the_port_of_its_scheme() -> None:
    assert parse_origin("https://Example.org") == Place("example.org", 443)
    assert parse_origin("http://example.org:8080") == Place("example.org", 8080)
    for wrong in ("null", "", "localhost", "file://", "chrome-extension://localhost", "http://", "http://localhost/x"):
        assert parse_origin(wrong) is None


@pytest.mark.parametrize(
    "host", ["[::1]evil", "localhost:evil", "localhost.evil", "evil.example", "127.0.0.1.evil", "localhost@evil", ""]
)
def test_only_this_machines_names_are_answered(tiny_app: Running, host: str) -> None:
    assert httpx.get(f"{tiny_app.url}/health", headers={"host": host}).status_code in (400, 421)


def test_two_host_names_are_none(tiny_app: Running) -> None:
    line = Line(tiny_app.url)
    line.send(f"GET /config HTTP/1.1\r\nHost: {line.host}\r\nHost: evil.example\r\n\r\n".encode())
    assert line.status() in (400, 421)
    line.close()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:7860", "127.0.0.1"])
def test_this_machines_names_are_answered_however_they_are_spelt(tiny_app: Running, host: str) -> None:
    assert httpx.get(f"{tiny_app.url}/config", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_page_of_another_site_changes_nothing(tiny_app: Running, origin: str) -> None:
    """A form or a script there can send every one of these, with the user's cookies in some browsers."""
    mine = Caller(tiny_app.url)
    headers = {"origin": origin.format(port=tiny_app.url.rsplit(":")[-1])}
    answers = [
        mine.upload(("a.txt", b"text"), **headers),
        mine.post("/call/clear", {"data": []}, **headers),
        mine.post("/queue/join", {"data": [], "fn_index": 0, "session_hash": mine.session}, **headers),
        mine.post("/cancel", {"session_hash": mine.session, "fn_index": 0, "event_id": "x"}, **headers),
        mine.web.post("/login", data={"username": "a", "password": "b"}, headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * len(answers)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_browser_says_about_the_sender_counts_even_without_an_origin(tiny_app: Running, site: str) -> None:
    mine, headers = Caller(tiny_app.url), {"sec-fetch-site": site}
    assert mine.upload(("a.txt", b"text"), **headers).status_code == 403
    assert mine.post("/call/stop", {"data": []}, **headers).status_code == 403
    assert mine.web.get("/logout", headers=headers).status_code == 403
    assert mine.web.get("/", headers={**headers, "sec-fetch-mode": "navigate"}).status_code == 200  # a link


def test_the_pages_own_requests_pass(tiny_app: Running) -> None:
    mine = Caller(tiny_app.url)
    headers = {"origin": tiny_app.url, "sec-fetch-site": "same-origin"}
    assert mine.upload(("a.txt", b"text"), **headers).status_code == 200
    assert mine.post("/call/documents", {"data": []}, **headers).status_code == 200


@pytest.mark.parametrize("origin", [*FOREIGN, "own"])
def test_no_page_of_another_origin_may_read_an_answer(tiny_app: Running, origin: str) -> None:
    web = Caller(tiny_app.url).web
    headers = {"origin": tiny_app.url if origin == "own" else origin}
    asking = {**headers, "access-control-request-method": "POST"}
    for answer in (web.get("/config", headers=headers), web.options(f"{API}/upload", headers=asking)):
        assert not [name for name in answer.headers if name.startswith("access-control-")]
