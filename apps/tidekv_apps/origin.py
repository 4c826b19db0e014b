"""Who a request is for and who sent the browser: host names and origins, parsed and compared as a whole."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from tidekv_apps.asgi import RefusedError, Scope, header, headers_of

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}
_FOREIGN = ("cross-site", "same-site")  # another port of this machine counts as same-site


@dataclass(frozen=True)
class Place:
    """A host name in one spelling, and a port."""

    name: str
    port: int | None


def parse_host(text: str) -> Place | None:
    """``localhost:7860`` or ``[::1]:7860``; None for anything else (``[::1]evil``, ``localhost:evil``)."""
    found = _HOST.fullmatch(text)
    if found is None:
        return None
    name = _plain_name(found["name"])
    return None if name is None else Place(name, int(found["port"]) if found["port"] else None)


def parse_origin(text: str) -> Place | None:
    """``http://localhost:7860``; None for ``null`` and for anything that is no web page's origin."""
    scheme, separator, host = text.partition("://")
    place = parse_host(host)
    if not separator or scheme not in _PORTS or place is None:
        return None
    return Place(place.name, place.port or _PORTS[scheme])


def check_host(scope: Scope, names: Collection[str] | None) -> Place:
    """The one host the request asks for.

    Args:
        scope: the request.
        names: those that are answered; None for any.

    Raises:
        RefusedError: none, several, one that is no host name, or another.
    """
    sent = headers_of(scope, b"host")
    place = parse_host(sent[0]) if len(sent) == 1 else None
    if place is None or (names is not None and place.name not in names):
        raise RefusedError(421, "this app does not answer to that host name")
    return place


def check_site(scope: Scope, host: Place) -> None:
    """Refuse what a page of another site sends, a page on another port of this machine included.

    Only the page itself may be opened from elsewhere: by a link.

    Raises:
        RefusedError: the request comes from another site.
    """
    opening = scope["method"] == "GET" and scope["path"] == "/"
    foreign = not opening and header(scope, b"sec-fetch-site") in _FOREIGN
    if foreign or not all(_same(origin, host) for origin in headers_of(scope, b"origin")):
        raise RefusedError(403, "requests from pages of other sites are not taken")


def _same(origin: str, host: Place) -> bool:
    place = parse_origin(origin)
    if place is None or place.name != host.name:
        return False
    return place.port == host.port or (host.port is None and place.port in _PORTS.values())


def _plain_name(name: str) -> str | None:
    if not name.startswith("["):
        return name.lower()
    try:
        return str(ipaddress.IPv6Address(name.strip("[]")))
    except ValueError:
        return None
