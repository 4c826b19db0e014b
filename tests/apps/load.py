"""Many clients at once, each with a habit of its own, against a running app.

    python -m tests.apps.load --url http://127.0.0.1:7860 --clients 50 --seconds 120

The app runs with a small model. Each client opens a page's sign of life, uploads, asks, stops, leaves in the middle of
an answer or reads it slowly, and counts what it was told. An answer is right if it is the one that the same document
and question got when the app had nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx

from tests.apps.web import API, Caller, until

SETTINGS = {"max_new_tokens": 12, "kept_tokens": 64}
QUESTION = "Who is the keeper?"
NAMES = ("alpha", "bravo", "carol", "delta", "erika", "frida", "greta", "helga", "irene", "julia")
BUSY = (429, 503, 507)  # polite: come again
POLITE = ("waiting already", "being answered", "being read", "stopped")


@dataclass
class Report:
    """What happened.

    Attributes:
        counts: how often clients did what, and how often they were asked to come again.
        wrong: what a client got that is not its own document's answer, or an unexpected status.
        seconds: how long the page and ``/health`` took, each time somebody looked.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"/": [], "/health": []})

    def percentile(self, path: str, share: float = 0.99) -> float:
        """Seconds within which that share of the requests was answered."""
        ordered = sorted(self.seconds[path])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def lines(self) -> list[str]:
        """For a terminal."""
        latency = [
            f"{path}: {len(self.seconds[path])} requests, median {1000 * self.percentile(path, 0.5):.0f} ms, "
            f"99th percentile {1000 * self.percentile(path):.0f} ms"
            for path in self.seconds
        ]
        return [*latency, ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items())), *self.wrong]


def document_of(name: str) -> tuple[str, bytes]:
    """A file name and its text."""
    return f"{name}.txt", f"The keeper of this station is called {name}. ".encode() * 4


@dataclass
class _Client:
    caller: Caller
    name: str
    reference: str
    report: Report

    def ask(self) -> None:
        """Add the document, ask, and compare."""
        self.caller.call("clear")
        self.caller.add(document_of(self.name))
        answer = self.caller.call("ask", QUESTION)
        self.report.counts["answered"] += 1
        if answer["answer"] != self.reference or not answer["sent"].startswith(f"{self.name}.txt"):
            self.report.wrong.append(f"{self.name} was told {answer['text']!r} from {answer['sent']!r}")

    def upload(self) -> None:
        """Add files and take them out again."""
        self.caller.add(*(document_of(name) for name in NAMES[:3]))
        self.caller.call("clear")
        self.report.counts["uploads"] += 1

    def stop(self) -> None:
        """Ask, and stop it, one way or the other."""
        event = self._begin()
        self.caller.post("/cancel", {"session_hash": self.caller.session, "fn_index": 0, "event_id": event})
        self.caller.call("stop")
        self.report.counts["stopped"] += 1

    def leave(self) -> None:
        """Close the connection in the middle of an answer."""
        event = self._begin()
        with self.caller.web.stream("GET", f"{API}/call/ask/{event}") as stream:
            next(stream.iter_raw(), b"")
        self.report.counts["left"] += 1

    def read_slowly(self) -> None:
        """Take the answer byte by byte, for a while."""
        event, begin = self._begin(), time.monotonic()
        with self.caller.web.stream("GET", f"{API}/call/ask/{event}") as stream:
            for _ in stream.iter_raw(1):
                time.sleep(0.02)
                if time.monotonic() - begin > 10:
                    break
        self.report.counts["read slowly"] += 1

    def break_off(self) -> None:
        """Send half a file."""
        with suppress(httpx.HTTPError):
            self.caller.web.post(
                f"{API}/upload", content=_half(), headers={"content-type": "multipart/form-data; boundary=b"}
            )
        self.report.counts["broken off"] += 1

    def _begin(self) -> str:
        self.caller.call("clear")
        self.caller.add(document_of(self.name))
        begun = self.caller.begin("ask", QUESTION)
        begun.raise_for_status()
        return str(begun.json()["event_id"])


def _half() -> Iterator[bytes]:
    yield b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n' + b"x" * 10_000
    raise httpx.WriteError("the client is gone")


HABITS = (_Client.ask, _Client.upload, _Client.stop, _Client.leave, _Client.read_slowly, _Client.ask, _Client.break_off)


@contextmanager
def living(url: str) -> Iterator[Caller]:
    """A caller with a page's sign of life; when it ends the app forgets the caller."""
    caller = Caller(url)
    try:
        with caller.web.stream("GET", f"{API}/heartbeat/{caller.session}") as life:
            life.raise_for_status()
            yield caller
    finally:
        caller.web.close()
        with suppress(ValueError):
            Caller.opened.remove(caller)


def references(url: str) -> dict[str, str]:
    """Each document's answer, while nobody else is there."""
    found = {}
    for name in NAMES:
        with living(url) as caller:
            caller.call("settings", SETTINGS)
            caller.add(document_of(name))
            found[name] = str(caller.call("ask", QUESTION)["answer"])
    return found


def press(url: str, known: dict[str, str], clients: int, seconds: float) -> Report:
    """Let so many clients go on for so long; returns when all have left.

    Args:
        url: of the app.
        known: what :func:`references` gave.
        clients: how many.
        seconds: after this a client does not begin anything new.
    """
    report, over = Report(), threading.Event()
    threads = [
        threading.Thread(target=_go_on, args=(url, number, known, report, over), name=f"client-{number}")
        for number in range(clients)
    ]
    watcher = threading.Thread(target=_watch, args=(url, report, over))
    for thread in (*threads, watcher):
        thread.start()
    over.wait(seconds)
    over.set()
    for thread in (*threads, watcher):
        thread.join()
    return report


def _go_on(url: str, number: int, known: dict[str, str], report: Report, over: threading.Event) -> None:
    name = NAMES[number % len(NAMES)]
    try:
        with living(url) as caller:
            caller.call("settings", SETTINGS)
            client, turn = _Client(caller, name, known[name], report), number
            while not over.is_set():
                _once(client, HABITS[turn % len(HABITS)])
                turn += 1
    except Exception as error:
        report.wrong.append(f"client {number} gave up: {error!r}")


def _once(client: _Client, habit: Callable[[_Client], None]) -> None:
    try:
        habit(client)
    except httpx.HTTPStatusError as error:
        _note_refusal(client.report, error.response)
    except AssertionError as error:  # the event ended with an error
        text = str(error)
        known = next(
            (word for word in ("waiting already", "being answered", "being read", "stopped") if word in text), ""
        )
        if not known:
            client.report.wrong.append(f"{habit.__name__}: {text[:300]}")
        client.report.counts[f"asked to wait ({known})"] += 1
        time.sleep(0.2)


def _note_refusal(report: Report, answer: httpx.Response) -> None:
    report.counts[f"status {answer.status_code}"] += 1
    if answer.status_code not in BUSY:
        report.wrong.append(f"{answer.request.url.path}: {answer.status_code} {answer.text[:200]}")
    time.sleep(0.2)


def _watch(url: str, report: Report, over: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=60) as web:
        while not over.wait(0.2):
            for path, seconds in report.seconds.items():
                begin = time.monotonic()
                status = web.get(path).status_code
                seconds.append(time.monotonic() - begin)
                if status != 200:
                    report.wrong.append(f"{path}: {status}")


def is_idle(url: str) -> bool:
    """Whether no question runs or waits."""
    return bool(httpx.get(f"{url}/health", timeout=60).json()["questions"] == 0)


def main() -> None:
    """Press a running app and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    report = press(options.url, references(options.url), options.clients, options.seconds)
    print("\n".join(report.lines()))
    print(json.dumps({"idle": until(lambda: is_idle(options.url), 60), "wrong": len(report.wrong)}))


if __name__ == "__main__":
    main()
