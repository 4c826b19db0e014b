"""Nobody takes everybody's place: shares per browser and per address, delays for wrong passwords."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest

from tests.apps.conftest import Running, start_limited, stop_app
from tests.apps.web import API, Caller, until
from tidekv_apps.asgi import RefusedError
from tidekv_apps.guard import MAX_OPEN_REQUESTS, Guard
from tidekv_apps.inbox import Inbox
from tidekv_apps.logins import FREE_TRIES, LONGEST_SECONDS, LoginDelays, delay_seconds
from tidekv_apps.presence import Presence
from tidekv_apps.settings import Limits

WORDS = b"The harbour master is Ida Holm."


@pytest.mark.parametrize("browsers", [1, 204])
def test_new_sessions_take_nobodys_documents(tiny_app: Running, browsers: int) -> None:
    """204 session ids, of one browser or of as many: the documents of somebody else stay."""
    mine = Caller(tiny_app.url)
    mine.add(("precious.txt", WORDS))
    crowd = [Caller(tiny_app.url) for _ in range(browsers)]
    for number in range(204):
        begun = crowd[number % browsers].begin("stop", session=f"new-{browsers}-{number}")
        assert begun.status_code in (200, 503)
    assert mine.documents() == ["precious.txt"]


def test_signs_of_life_are_sessions_too(tiny_app: Running) -> None:
    mine, other = Caller(tiny_app.url), Caller(tiny_app.url)
    mine.add(("precious.txt", WORDS))
    for number in range(30):
        with other.web.stream("GET", f"{API}/heartbeat/life-{number}") as life:
            assert life.status_code == 200
    assert mine.documents() == ["precious.txt"]


def test_a_newcomer_is_refused_politely_when_everybody_holds_something(tiny_model_path: Path, tmp_path: Path) -> None:
    running = start_limited(tmp_path, tiny_model_path, limits={"visits": 6, "visits_per_owner": 2})
    try:
        users = [Caller(running.url) for _ in range(3)]
        for number, user in enumerate(users):
            user.add((f"{number}.txt", WORDS))
        newcomer = Caller(running.url)
        refused = newcomer.begin("documents")
        assert refused.status_code == 503 and "try" in refused.json()["error"] and "retry-after" in refused.headers
        assert newcomer.web.get("/").status_code == 200  # the page itself says the same
        assert [user.documents() for user in users] == [[f"{number}.txt"] for number in range(3)]
        users[0].call("clear")  # holds nothing now: makes room
        assert newcomer.documents() == []
    finally:
        stop_app(running)


def test_one_address_has_only_so_many_requests_open(tmp_path: Path) -> None:
    """Counted before anything is read; another address does not notice, and what ends is not counted any more."""
    answers: Counter[int] = Counter()

    async def crowd() -> None:
        over = asyncio.Event()

        async def waiting_app(scope: Any, receive: Any, send: Any) -> None:
            await over.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        inbox = Inbox(tmp_path, Limits())
        guard = Guard(
            waiting_app,
            hosts=None,
            visits=Mock(),
            inbox=inbox,
            health=lambda: (True, {}),
            presence=Presence(patience=60),
        )

        async def request(address: str) -> None:
            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    answers[message["status"]] += 1

            headers = [(b"host", b"localhost")]
            scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": (address, 1)}
            await guard(scope, AsyncMock(), send)

        async with asyncio.TaskGroup() as group:
            for address in ["192.0.2.1"] * (MAX_OPEN_REQUESTS + 7) + ["192.0.2.2"] * 3:
                group.create_task(request(address))
            while not answers[429]:
                await asyncio.sleep(0)
            over.set()
        await request("192.0.2.1")

    asyncio.run(crowd())
    assert answers == {200: MAX_OPEN_REQUESTS + 4, 429: 7}


# --- passwords ------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused_for(delays: LoginDelays, address: str) -> float:
    """Seconds to wait; 0 if the password would be looked at."""
    try:
        delays.begin(address)
    except RefusedError as error:
        return error.retry_seconds or 0.0
    return 0.0


def test_each_wrong_password_doubles_the_wait_up_to_a_limit() -> None:
    assert [delay_seconds(wrong) for wrong in range(6)] == [0, 0, 0, 2, 4, 8]
    assert delay_seconds(10_000) == LONGEST_SECONDS


def test_a_right_password_starts_anew_and_time_lets_one_try() -> None:
    clock = Clock()
    delays = LoginDelays(clock)
    assert [refused_for(delays, "a") for _ in range(FREE_TRIES + 1)] == [0, 0, 0, 2.0]
    assert refused_for(delays, "b") == 0
    clock.now = 2.5
    assert refused_for(delays, "a") == 0
    assert refused_for(delays, "a") == 4.0
    delays.succeeded("a")
    assert [refused_for(delays, "a") for _ in range(FREE_TRIES)] == [0, 0, 0]


def test_the_addresses_of_one_ipv6_customer_are_one() -> None:
    delays = LoginDelays(Clock())
    waits = [refused_for(delays, f"2001:db8:0:1::{number:x}") for number in range(1, 5)]
    assert waits == [0, 0, 0, 2.0]
    assert refused_for(delays, "2001:db8:0:2::1") == 0
    assert [refused_for(delays, f"::ffff:192.0.2.{number}") for number in range(1, 6)] == [0] * 5


def test_guessing_passwords_is_slow_and_the_right_one_comes_through_later(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    running = start_limited(tmp_path, tiny_model_path, auth=["ida", "lighthouse"])

    def log_in(password: str) -> httpx.Response:
        return httpx.post(f"{running.url}/login", data={"username": "ida", "password": password}, timeout=60)

    try:
        begin = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            guesses = list(pool.map(log_in, [f"wrong-{number}" for number in range(100)]))
        looked_at = sum(guess.status_code == 400 for guess in guesses)
        # 3 at once, then one after 2, 4, 8 ... seconds, however long the machine took for a hundred requests.
        allowed = FREE_TRIES + sum(2 * 2**n - 2 < time.monotonic() - begin for n in range(1, 12))
        assert FREE_TRIES <= looked_at <= allowed
        refused = [guess for guess in guesses if guess.status_code == 429]
        assert len(refused) + looked_at == 100 and all(int(guess.headers["retry-after"]) >= 1 for guess in refused)
        assert until(lambda: log_in("lighthouse").status_code == 200)
    finally:
        stop_app(running)


def test_health_says_whether_questions_are_answered(tiny_app: Running) -> None:
    assert until(lambda: httpx.get(f"{tiny_app.url}/health").json()["status"] == "ok")
    answer = httpx.get(f"{tiny_app.url}/health")
    assert answer.status_code == 200 and answer.json() == {"status": "ok", "questions": 0}
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_health_of_a_model_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    running = start_limited(tmp_path, tmp_path / "model")
    try:
        assert until(lambda: httpx.get(f"{running.url}/health").json()["status"] == "failed")
        assert httpx.get(f"{running.url}/health").status_code == 503
    finally:
        stop_app(running)


def test_every_answer_has_a_content_security_policy(tiny_app: Running) -> None:
    for path in ("/", "/health", "/not-there", "/config"):
        headers = httpx.get(tiny_app.url + path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy and "connect-src 'self'" in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
