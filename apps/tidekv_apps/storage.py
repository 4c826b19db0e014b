"""What users keep on this server, in real bytes: counted before it is stored, for each visit, each owner and all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from tidekv_apps.settings import Limits
from tidekv_llm.errors import DocumentError
from tidekv_llm.sizes import format_bytes


@dataclass(frozen=True)
class Holder:
    """Who keeps something: one visit of one owner."""

    owner: str
    visit: str


@dataclass
class Ledger:
    """Bytes of one kind.

    Args:
        kind: what they are, for messages.
        per_visit: most for one visit.
        per_owner: most for all visits of one owner.
        in_all: most for everybody together.
    """

    kind: str
    per_visit: int
    per_owner: int
    in_all: int
    total: int = 0
    _held: dict[tuple[Holder, Hashable], int] = field(default_factory=dict)
    _sums: Counter[Holder | str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, holder: Holder, key: Hashable, size: int) -> None:
        """Count ``size`` bytes; nothing if they are counted already.

        Raises:
            DocumentError: they would be too many; nothing is counted then.
        """
        with self._lock:
            if (holder, key) in self._held:
                return
            self._check(holder, size)
            self._held[holder, key] = size
            self._add(holder, size)

    def keep_only(self, holder: Holder, keys: Collection[Hashable]) -> int:
        """Everything else of the visit is gone; returns how many bytes that was."""
        with self._lock:
            gone = [(one, key) for one, key in self._held if one == holder and key not in keys]
            size = sum(self._held.pop(one) for one in gone)
            self._add(holder, -size)
            return size

    def held(self, holder: Holder | str) -> int:
        """Bytes of a visit, or of an owner."""
        return self._sums[holder]

    def _add(self, holder: Holder, size: int) -> None:
        self.total += size
        for one in (holder, holder.owner):
            self._sums[one] += size
            if not self._sums[one]:
                del self._sums[one]

    def _check(self, holder: Holder, size: int) -> None:
        if self._sums[holder] + size > self.per_visit:
            raise DocumentError(
                f"all {self.kind} of a conversation may have {format_bytes(self.per_visit)}; remove some first"
            )
        if self._sums[holder.owner] + size > self.per_owner:
            raise DocumentError(
                f"all {self.kind} of yours may have {format_bytes(self.per_owner)}; close another conversation first"
            )
        if self.total + size > self.in_all:
            raise DocumentError(f"the server has no room for more {self.kind}; try again later")


class Storage:
    """The ledgers of the app.

    Args:
        limits: what a visit, an owner and all together may keep.
    """

    def __init__(self, limits: Limits) -> None:
        self.files = Ledger("files", limits.visit_bytes, limits.owner_bytes, limits.stored_bytes)
        self.texts = Ledger("texts", limits.text_bytes, limits.text_bytes, limits.all_text_bytes)
