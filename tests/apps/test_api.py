"""The named endpoints of a running app, as ``gradio_client`` and as strangers call them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.apps.conftest import Running, start_app, stop_app
from tests.apps.support import GARDEN, HARBOUR, write
from tests.documents.pdf_writer import document, stream, text_pdf

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ANSWER = {"max_new_tokens": 12}


@pytest.fixture
def client(app: Running) -> Callable[[], Any]:
    return lambda: connect(app)


def connect(app: Running) -> Any:
    from gradio_client import Client

    made = Client(app.url, verbose=False)
    made.predict(ANSWER, api_name="/settings")
    return made


def upload(client: Any, *paths: Path, password: str = "") -> dict[str, Any]:
    from gradio_client import handle_file

    answer: dict[str, Any] = client.predict([handle_file(path) for path in paths], password, api_name="/add_documents")
    return answer


def message(call: Callable[[], Any]) -> str:
    """What the caller is told when the call is refused."""
    from gradio_client.exceptions import AppError

    with pytest.raises(AppError) as caught:
        call()
    return str(caught.value)


def test_documents_questions_follow_ups_and_export(client: Callable[[], Any], tmp_path: Path) -> None:
    mine = client()
    listed = upload(mine, write(tmp_path, "harbour.pdf", HARBOUR))
    assert listed["documents"][0]["readable_pages"] == 2 and listed["budget"]["fits"]
    first = mine.predict("What does a berth cost?", api_name="/ask")
    assert first["sent"] == "harbour.pdf pages 1-2"
    assert first["metrics"]["reused_prefix_tokens"] == 0
    assert first["prompt_tokens"] <= listed["budget"]["total"]
    second = mine.predict("Who is the harbour master?", api_name="/ask")
    assert second["metrics"]["reused_prefix_tokens"] > 50
    assert second["metrics"]["ttft_seconds"] > 0
    text = mine.predict("markdown", api_name="/export")
    assert "What does a berth cost?" in text and "construction peak" in text
    assert len(json.loads(mine.predict("json", api_name="/export"))["turns"]) == 2


def test_the_needles_on_the_first_and_the_last_page_are_in_the_prompt(
    client: Callable[[], Any], tmp_path: Path
) -> None:
    """Nothing is cut: as many kept pages as there are, first and last included."""
    mine = client()
    upload(mine, write(tmp_path, "harbour.pdf", HARBOUR))
    answer = mine.predict("What does a berth cost?", api_name="/ask")
    assert [page["page"] for page in answer["page_strip"]] == [1, 2]
    assert all(page["kept"] > 0 for page in answer["page_strip"])


def test_sessions_see_nothing_of_each_other_and_share_no_prefix(client: Callable[[], Any], tmp_path: Path) -> None:
    mine, other = client(), client()
    upload(mine, write(tmp_path, "harbour.pdf", HARBOUR))
    mine.predict("What does a berth cost?", api_name="/ask")
    assert other.predict(api_name="/documents")["documents"] == []
    assert "no document" in message(lambda: other.predict("What does a berth cost?", api_name="/ask"))
    assert json.loads(other.predict("json", api_name="/export"))["turns"] == []
    upload(other, write(tmp_path, "harbour.pdf", HARBOUR))
    answer = other.predict("What does a berth cost?", api_name="/ask")
    assert answer["metrics"]["reused_prefix_tokens"] == 0


def test_a_failed_upload_leaves_no_document_to_answer_from(client: Callable[[], Any], tmp_path: Path) -> None:
    mine = client()
    upload(mine, write(tmp_path, "harbour.pdf", HARBOUR))
    listed = upload(mine, write(tmp_path, "empty.pdf", document([stream(b"")])))
    assert [entry["state"] for entry in listed["documents"]] == ["failed"]
    assert "no text" in listed["documents"][0]["error"]
    assert "no document" in message(lambda: mine.predict("What does a berth cost?", api_name="/ask"))


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "../../etc/passwd", "http://192.0.2.1/x.pdf"])
def test_forged_paths_reach_no_file_and_no_host(app: Running, path: str) -> None:
    forged = {"path": path, "orig_name": "x.pdf", "meta": {"_type": "gradio.FileData"}}
    text = raw_call(app, "add_documents", [[forged], ""])
    assert "root:" not in text and "Traceback" not in text and "/site-packages" not in text
    assert '"state": "ready"' not in text


def raw_call(app: Running, name: str, data: list[Any]) -> str:
    """An endpoint without the official client's checks; what came back, whatever it was."""
    with httpx.Client(timeout=60) as web:
        web.get(f"{app.url}/config")  # gives the cookie
        begun = web.post(f"{app.url}/gradio_api/call/{name}", json={"data": data})
        if begun.status_code != 200:
            return begun.text
        return web.get(f"{app.url}/gradio_api/call/{name}/{begun.json()['event_id']}").text


def test_a_ten_megabyte_question_is_refused_without_model_work(app: Running) -> None:
    body = {"data": ["x" * 10_000_000]}
    with httpx.Client(timeout=60) as web:
        web.get(f"{app.url}/config")
        answer = web.post(f"{app.url}/gradio_api/call/ask", json=body)
    assert answer.status_code == 413
    assert "/" not in answer.json()["error"]


def test_a_question_that_is_too_long_is_named(client: Callable[[], Any], tmp_path: Path) -> None:
    mine = client()
    upload(mine, write(tmp_path, "harbour.pdf", HARBOUR))
    assert "20,000 characters" in message(lambda: mine.predict("x" * 20_001, api_name="/ask"))


def test_more_than_the_window_is_refused_with_both_numbers_and_best_pages_help(
    client: Callable[[], Any], tmp_path: Path
) -> None:
    mine = client()
    pages = [[f"Page {number} tells of sheep and grass and rain."] * 12 for number in range(12)]
    pages[7] = ["The zebra sleeps in the barn."]
    upload(mine, write(tmp_path, "long.pdf", text_pdf(*pages)))
    mine.predict({"context_window": 700}, api_name="/settings")
    refused = message(lambda: mine.predict("Where does the zebra sleep?", api_name="/ask"))
    assert "do not fit the context window of 700" in refused
    mine.predict({"retrieval": True}, api_name="/settings")
    answer = mine.predict("Where does the zebra sleep?", api_name="/ask")
    assert "8" in answer["sent"] and answer["sent"] != "long.pdf pages 1-12"
    assert answer["prompt_tokens"] + 12 <= 700


def test_impossible_settings_are_refused_over_the_api(client: Callable[[], Any]) -> None:
    assert "kept_tokens=3" in message(lambda: client().predict({"kept_tokens": 3}, api_name="/settings"))
    assert "not offered" in message(lambda: client().predict({"model": "/etc/passwd"}, api_name="/settings"))


def test_an_encrypted_file_waits_for_its_password(client: Callable[[], Any], tmp_path: Path) -> None:
    pypdf = pytest.importorskip("pypdf")
    plain = write(tmp_path, "plain.pdf", GARDEN)
    writer = pypdf.PdfWriter(clone_from=plain)
    writer.encrypt("s3cret", algorithm="AES-256")
    locked = tmp_path / "locked.pdf"
    writer.write(locked)
    mine = client()
    assert upload(mine, locked)["documents"][0]["state"] == "locked"
    assert "needs its password" in message(lambda: mine.predict("How deep is the pond?", api_name="/ask"))
    wrong = upload(mine, locked, password="no")["documents"][0]
    assert wrong["state"] == "locked" and "wrong password" in wrong["error"]
    assert upload(mine, locked, password="s3cret")["documents"][0]["state"] == "ready"


def test_upload_bombs_leave_the_server_alive_and_small(app: Running, client: Callable[[], Any], tmp_path: Path) -> None:
    bomb = document([stream(b" " * 200_000_000, compress=True)])
    mine, before, most = client(), app.rss(), 0
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, app.rss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    listed = upload(mine, write(tmp_path, "bomb.pdf", bomb))
    over.set()
    watcher.join()
    assert app.alive()
    assert most - before < 1_300 << 20  # the child's own limit is 1 GiB
    assert listed["documents"][0]["state"] in ("failed", "ready")
    assert "Traceback" not in json.dumps(listed)


def test_stop_frees_the_queue_and_the_next_question_is_answered(client: Callable[[], Any], tmp_path: Path) -> None:
    mine = client()
    lines = [f"Line {number} tells of the weather on the island." for number in range(40)]
    upload(mine, write(tmp_path, "w.pdf", text_pdf(*[lines] * 5)))
    for _ in range(3):
        running = mine.submit("What is the weather?", api_name="/ask")
        while not running.done():  # it may not have begun yet
            mine.predict(api_name="/stop")
            time.sleep(0.1)
        assert "stopped" in message(running.result)
    assert mine.predict("What is the weather?", api_name="/ask")["state"] == "done"


def test_every_button_of_the_page_is_private_and_every_endpoint_named(app: Running) -> None:
    with httpx.Client() as web:
        named = web.get(f"{app.url}/gradio_api/info").json()["named_endpoints"]
    assert set(named) == {"/add_documents", "/ask", "/settings", "/documents", "/export", "/stop", "/clear"}


def test_uploads_are_private_files(app: Running, client: Callable[[], Any], tmp_path: Path) -> None:
    upload(client(), write(tmp_path, "harbour.pdf", HARBOUR))
    (folder,) = app.log.parent.glob("tidekv-app-*")
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)


def test_a_login_is_asked_for_and_a_wrong_one_refused(embedded_model_path: Path, tmp_path: Path) -> None:
    running = start_app(tmp_path, "--host", "0.0.0.0", env={"TIDEKV_APP_AUTH": "ida:lighthouse"})
    url = running.url.replace("0.0.0.0", "127.0.0.1")
    try:
        with httpx.Client() as web:
            assert web.get(f"{url}/config").status_code == 401
            assert web.post(f"{url}/gradio_api/call/documents", json={"data": []}).status_code == 401
            wrong = web.post(f"{url}/login", data={"username": "ida", "password": "wrong-wrong"})
            assert wrong.status_code == 400
            assert web.post(f"{url}/login", data={"username": "ida", "password": "lighthouse"}).status_code == 200
            assert web.get(f"{url}/config").status_code == 200
    finally:
        stop_app(running)
    assert not list(tmp_path.glob("tidekv-app-*"))  # files go with the app


@pytest.mark.slow
def test_twenty_questions_of_four_users_at_once_find_their_own_documents(app: Running, tmp_path: Path) -> None:
    names = ("alpha", "bravo", "carol", "delta")
    files = [
        write(tmp_path, f"{name}.pdf", text_pdf([f"The keeper of this station is called {name}."] * 8))
        for name in names
    ]
    clients = [connect(app) for _ in names]
    for one, path in zip(clients, files, strict=True):
        upload(one, path)
    before = app.rss()

    def ask(number: int) -> list[dict[str, Any]]:
        return [clients[number].predict("What is the keeper called?", api_name="/ask") for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for name, mine in zip(names, answers, strict=True):
        assert len(mine) == 5
        for answer in mine:
            assert answer["state"] == "done" and answer["sent"] == f"{name}.pdf page 1".replace("page", "pages")
            assert {cite["document"] for cite in answer["citations"]} <= {f"{name}.pdf"}
            assert not any("another request ran at the same time" in note for note in answer["metrics"]["notes"])
    assert app.rss() - before < 300 << 20
