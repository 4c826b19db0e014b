"""Wrong passwords: each one makes the next try of that address wait longer."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tidekv_apps.asgi import RefusedError

FREE_TRIES = 3
LONGEST_SECONDS = 900.0
_ADDRESSES = 10_000


@dataclass
class _Tries:
    wrong: int = 0
    until: float = 0.0


class LoginDelays:
    """Counts a try when it begins, so that a hundred at the same time are a hundred.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def begin(self, address: str) -> None:
        """A password is about to be tried.

        Raises:
            RefusedError: too soon after wrong ones; the password was not looked at.
        """
        tries, now = self._of(_network(address)), self._clock()
        if now < tries.until:
            wait = tries.until - now
            raise RefusedError(429, f"too many wrong passwords; try again in {wait:.0f} s", wait)
        tries.wrong += 1
        tries.until = now + delay_seconds(tries.wrong)

    def succeeded(self, address: str) -> None:
        """It was the right one: the address starts anew."""
        self._tries.pop(_network(address), None)

    def _of(self, network: str) -> _Tries:
        tries = self._tries.setdefault(network, _Tries())
        self._tries.move_to_end(network)
        if len(self._tries) > _ADDRESSES:
            self._tries.popitem(last=False)
        return tries


def delay_seconds(wrong: int) -> float:
    """How long to wait after so many wrong passwords: 0, 0, 2, 4, 8 ... seconds."""
    doublings = min(wrong - FREE_TRIES + 1, 10)  # 2**10 is beyond the longest
    return min(LONGEST_SECONDS, 2.0**doublings) if wrong >= FREE_TRIES else 0.0


def _network(address: str) -> str:
    """One customer's IPv6 addresses are a whole /64 network: they count as one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False))
