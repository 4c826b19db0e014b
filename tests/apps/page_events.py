"""The page's own events over HTTP, as the browser sends them."""

from __future__ import annotations

import json
from typing import Any

from tests.apps.web import API, Caller


class Tab(Caller):
    """A browser tab without a browser."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        config = self.web.get("/config").json()
        self._ids = {part["props"].get("elem_id"): part["id"] for part in config["components"]}
        self._labels = {part["props"].get("label"): part["id"] for part in config["components"]}
        self._events = {
            (target, trigger): event for event in config["dependencies"] for target, trigger in event["targets"]
        }

    def fire(
        self, trigger: str, *data: Any, elem: str = "", label: str = "", act: dict[str, str] | None = None
    ) -> list[Any]:
        """What the event's last message brings; its data are filled up with nothing."""
        part = self._ids[elem] if elem else self._labels[label] if label else None
        event = self._events[part, trigger]
        values = [*data, *[None] * (len(event["inputs"]) - len(data))]
        body = {"data": values, "event_data": act, "fn_index": event["id"], "trigger_id": part}
        joined = self.post("/queue/join", {**body, "session_hash": self.session})
        joined.raise_for_status()
        return self._last(joined.json()["event_id"])

    def _last(self, event: str) -> list[Any]:
        with self.web.stream("GET", f"{API}/queue/data", params={"session_hash": self.session}) as stream:
            for line in stream.iter_lines():
                message = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
                if message.get("event_id") == event and message["msg"] == "process_completed":
                    assert message["success"], message
                    output: list[Any] = message["output"]["data"]
                    return output
        raise AssertionError("the event did not end")

    def click(self, act: str, argument: str = "", value: str = "", panel: str = "tk-document-list") -> list[Any]:
        """A click inside a panel."""
        return self.fire("click", "", elem=panel, act={"act": act, "arg": argument, "value": value})
