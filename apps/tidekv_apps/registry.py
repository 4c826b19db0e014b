"""All visits: whose each is, how many there may be, and which make room for a new one."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from tidekv_apps.settings import AskSettings, Limits
from tidekv_apps.storage import Storage
from tidekv_apps.visits import Visit, VisitClosedError
from tidekv_llm.errors import BusyError


class Registry:
    """All visits, by Gradio's session id; a session id opens nothing without its owner.

    Args:
        folder: where each visit gets a folder of its own.
        limits: how many, for how long.
        new_settings: what a new visit begins with.
        storage: what all visits keep.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        new_settings: Callable[[], AskSettings],
        storage: Storage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._limits, self._new_settings, self._clock = folder, limits, new_settings, clock
        self._storage = storage
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._visits)

    def get(self, key: str, owner: str, address: str = "") -> Visit:
        """The visit of that id, made when it is new.

        Raises:
            VisitClosedError: it belongs to another browser.
            BusyError: the owner, the address or everybody together has too many visits that hold something.
        """
        with self._lock:
            visit = self._visits.get(key)
            if visit is None:
                visit = self._make(key, owner, address)
            elif visit.owner != owner:
                raise VisitClosedError("this visit belongs to another browser; reload the page")
            visit.last_used = self._clock()
            self._visits.move_to_end(key)
            return visit

    def owns(self, key: str, owner: str) -> bool:
        """Whether that visit is there and the owner's."""
        visit = self._visits.get(key)
        return visit is not None and visit.owner == owner

    def note_event(self, key: str, event: str) -> None:
        """An event of Gradio's was begun in a visit."""
        visit = self._visits.get(key)
        if visit is not None:
            visit.events.append(event)

    def owns_event(self, event: str, owner: str) -> bool:
        """Whether a visit of the owner began that event."""
        with self._lock:
            return any(visit.owner == owner and event in visit.events for visit in self._visits.values())

    def _make(self, key: str, owner: str, address: str) -> Visit:
        limits, visits = self._limits, self._visits
        own = [k for k, visit in visits.items() if visit.owner == owner]
        near = [k for k, visit in visits.items() if visit.address == address]
        self._make_room(own, limits.visits_per_owner, "you have too many conversations open; close one")
        self._make_room(near, max(1, limits.visits // 2), "too many people at your address use this app; try later")
        self._make_room(list(visits), limits.visits, "too many people are using this app; try again in a minute")
        folder = self._folder / secrets.token_hex(8)
        folder.mkdir(mode=0o700, parents=True)
        visit = Visit(owner, folder, self._new_settings(), self._storage, address)
        visits[key] = visit
        return visit

    def _make_room(self, keys: list[str], limit: int, reason: str) -> None:
        """Close the longest unused of those visits that holds nothing, if they are too many."""
        if len([key for key in keys if key in self._visits]) < limit:
            return
        empty = next((key for key in keys if key in self._visits and self._visits[key].empty), None)
        if empty is None:
            raise BusyError(reason)
        self._visits.pop(empty).close()

    def close(self, key: str, owner: str) -> None:
        """Free the visit of a tab that was closed; nothing if it is another browser's."""
        with self._lock:
            if not self.owns(key, owner):
                return
            visit = self._visits.pop(key)
        visit.close()

    def sweep(self) -> int:
        """Close idle visits and free stores beyond the limit; returns how many visits were closed."""
        now = self._clock()
        with self._lock:
            old = [
                key
                for key, visit in self._visits.items()
                if now - visit.last_used > self._limits.idle_seconds and not visit.busy
            ]
            closing = [self._visits.pop(key) for key in old]
        for visit in closing:
            visit.close()
        self.trim_stores()
        return len(closing)

    def trim_stores(self, keep: Visit | None = None) -> None:
        """Free the least recently used stores until all together fit the limit."""
        with self._lock:
            visits = list(self._visits.values())
        total = sum(visit.reader.store_bytes for visit in visits if visit.reader is not None)
        for visit in visits:
            if total <= self._limits.store_bytes:
                return
            if visit.reader is not None and visit is not keep:
                total -= visit.reader.store_bytes
                visit.drop_reader()

    def drop_readers(self) -> None:
        """Free every store: their model is about to be unloaded."""
        with self._lock:
            visits = list(self._visits.values())
        for visit in visits:
            visit.drop_reader()

    def close_all(self) -> None:
        """End of the program."""
        with self._lock:
            visits, self._visits = list(self._visits.values()), OrderedDict()
        for visit in visits:
            visit.close()
