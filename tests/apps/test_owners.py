"""A session id or an event id opens nothing without the cookie of its owner."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import httpx
import pytest

from tests.apps.conftest import Running, start_limited, stop_app
from tests.apps.web import API, Caller, Line, until
from tidekv_apps.asgi import RefusedError
from tidekv_apps.doors import find_door
from tidekv_apps.owners import OWNER_COOKIE


def strangers(app: Running) -> list[Caller]:
    """One without a cookie, one with a cookie of its own, one with a forged one."""
    forged = Caller(app.url)
    value = forged.web.cookies[OWNER_COOKIE]
    forged.web.cookies.clear()
    forged.web.cookies.set(OWNER_COOKIE, ("B" if value[0] == "A" else "A") + value[1:])
    return [Caller(app.url, cookie=False), Caller(app.url), forged]


def test_nobody_else_reads_an_answer_or_breaks_it_off(tiny_app: Running) -> None:
    mine = Caller(tiny_app.url)
    mine.add(("harbour.txt", b"The harbour master is Ida Holm."))
    event = mine.begin("export", "json").json()["event_id"]
    ids = {"session_hash": mine.session, "fn_index": 0, "event_id": event}
    for other in strangers(tiny_app):
        answers = [
            other.result("export", event),
            other.web.get(f"{API}/queue/data", params={"session_hash": mine.session}),
            other.post("/cancel", ids),
            other.web.get(f"{API}/heartbeat/{mine.session}"),
            other.begin("documents", session=mine.session),
            other.post("/queue/join", {"data": [], "fn_index": 0, "session_hash": mine.session}),
            other.post("/run/stop", {"data": [], "session_hash": mine.session}),
        ]
        assert [answer.status_code for answer in answers] == [403] * len(answers)
        assert not any("harbour" in answer.text for answer in answers)
    assert "harbour.txt" in mine.result("export", event).text


def test_ones_own_session_does_not_open_another_ones_event(tiny_app: Running) -> None:
    mine, other = Caller(tiny_app.url), Caller(tiny_app.url)
    event = mine.begin("documents").json()["event_id"]
    assert other.begin("documents").status_code == 200
    ids = {"session_hash": other.session, "fn_index": 0, "event_id": event}
    assert other.post("/cancel", ids).status_code == 403
    assert "event: complete" in mine.result("documents", event).text


def test_two_api_clients_that_name_no_session_share_nothing(tiny_app: Running) -> None:
    """Without a session each call has one of its own; without a cookie there is none to have."""
    one, two = Caller(tiny_app.url), Caller(tiny_app.url)
    begun = one.post("/call/documents", {"data": []})
    assert begun.status_code == 200
    assert two.result("documents", begun.json()["event_id"]).status_code == 403
    refused = Caller(tiny_app.url, cookie=False).post("/call/documents", {"data": []})
    assert refused.status_code == 403 and "cookie" in refused.json()["error"]


def test_the_cookie_of_an_owner_is_seen_by_no_script_and_sent_by_no_other_site(tiny_app: Running) -> None:
    for path in ("/", "/config"):
        cookie = httpx.get(tiny_app.url + path).headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    mine = Caller(tiny_app.url)
    assert "set-cookie" not in mine.web.get("/").headers
    assert Caller(tiny_app.url).web.cookies[OWNER_COOKIE] != mine.web.cookies[OWNER_COOKIE]


def test_another_ones_upload_is_neither_added_nor_watched(tiny_app: Running) -> None:
    mine, other, line = Caller(tiny_app.url), Caller(tiny_app.url), Line(tiny_app.url)
    progress = f"{API}/upload_progress?upload_id=u1"
    line.begin_upload(mine, "a.txt", b"mine", "u1")
    with mine.web.stream("GET", progress) as watched:
        assert "a.txt" in next(watched.iter_lines())
    assert other.web.get(progress).text == 'data: {"msg": "done"}\n\n'
    assert line.end_upload() == 200
    (name,) = json.loads(line.body())
    line.close()
    assert mine.web.get(progress).text == 'data: {"msg": "done"}\n\n'  # a page that listens too late is told the end
    named = [{"path": name, "meta": {"_type": "gradio.FileData"}}]
    assert other.begin("add_documents", named, "").status_code == 400
    assert [entry["name"] for entry in mine.call("add_documents", named, "")["documents"]] == ["a.txt"]


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../../etc/passwd", "http://192.0.2.1/x.pdf", " file:///etc/passwd", "0" * 32 + "/x", 7, None, {}],
)
def test_a_file_is_named_as_the_upload_named_it_or_refused(tiny_app: Running, path: object) -> None:
    mine = Caller(tiny_app.url)
    forged = {"path": path, "url": "http://192.0.2.1/x.pdf", "meta": {"_type": "gradio.FileData"}}
    for body in ([[forged], ""], [forged, ""], [[[{"deep": forged}]], ""]):
        answer = mine.begin("add_documents", *body)
        assert answer.status_code == 400 and "uploaded" in answer.json()["error"]
    assert "Traceback" not in tiny_app.log.read_text()


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{", b"[" * 100_000, b'{"session_hash": 5, "data": []}'])
def test_a_body_that_is_no_request_is_refused_in_one_line(tiny_app: Running, body: bytes) -> None:
    mine = Caller(tiny_app.url)
    for path in ("/queue/join", "/call/documents", "/cancel"):
        answer = mine.web.post(API + path, content=body)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]


def test_a_long_request_is_refused_with_and_without_a_length(tiny_app: Running) -> None:
    mine, question = Caller(tiny_app.url), json.dumps({"data": ["x" * 10_000_000]}).encode()
    assert mine.web.post(f"{API}/call/ask", content=question).status_code == 413
    pieces = (question[at : at + 100_000] for at in range(0, len(question), 100_000))
    with contextlib.suppress(httpx.HTTPError):  # the server may end the connection while the client still writes
        assert mine.web.post(f"{API}/call/ask", content=pieces).status_code == 413
    assert tiny_app.alive()


def test_every_route_of_gradio_is_opened_by_name_or_closed(tiny_app: Running) -> None:
    listing = (
        "import json, gradio as gr\nfrom gradio.routes import App\n"
        "with gr.Blocks(analytics_enabled=False) as blocks:\n    gr.Markdown('x')\n"
        "routes = App.create_app(blocks).routes\n"
        "routes += [inner for r in routes if hasattr(r, 'original_router') for inner in r.original_router.routes]\n"
        "print(json.dumps([[m, r.path] for r in routes for m in getattr(r, 'methods', None) or ()]))"
    )
    listed = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True).stdout
    known = {(method, path) for method, path in json.loads(listed)}
    assert len(known) > 60
    mine = Caller(tiny_app.url)
    closed = []
    for method, template in sorted(known):
        path = template.replace("{path:path}", "x").replace("{", "").replace("}", "").replace(":path", "")
        try:
            find_door({"method": method, "path": path})
        except RefusedError:
            closed.append(path)
            assert mine.web.request(method, path, follow_redirects=False).status_code in (404, 405)
    for part in ("proxy=", "file=", "deep_link", "component_server", "stream/", "vibe", "dev/reload", "runs", "token"):
        assert any(part in path for path in closed), part


def test_a_route_that_nobody_knows_is_not_there(tiny_app: Running) -> None:
    mine = Caller(tiny_app.url)
    for path in ("/gradio_api/new", "/gradio_api/queue/join/more", "/docs", "/openapi.json", "/x"):
        assert mine.web.get(path).status_code == 404
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert mine.web.request(method, f"{API}/queue/join").status_code == 405


def test_with_a_login_nothing_works_without_it(tiny_model_path: object, tmp_path: object) -> None:
    running = start_limited(tmp_path, tiny_model_path, auth=["ida", "lighthouse"])  # type: ignore[arg-type]
    try:
        stranger = Caller(running.url)
        ids = {"session_hash": stranger.session, "fn_index": 0, "event_id": "e"}
        answers = [
            stranger.post("/cancel", ids),
            stranger.web.get(f"{API}/heartbeat/{stranger.session}"),
            stranger.upload(("a.txt", b"x")),
            stranger.begin("documents"),
            stranger.web.get(f"{API}/queue/data", params={"session_hash": stranger.session}),
        ]
        assert [answer.status_code for answer in answers] == [401] * len(answers)
        health = httpx.get(f"{running.url}/health")
        assert health.status_code in (200, 503) and set(health.json()) == {"status", "questions"}
        mine = Caller(running.url)
        assert mine.web.post("/login", data={"username": "ida", "password": "lighthouse"}).status_code == 200
        assert until(lambda: httpx.get(f"{running.url}/health").status_code == 200)
        assert mine.documents() == []
    finally:
        stop_app(running)
