"""The files of a multipart body, piece by piece, without holding the body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from tidekv_apps.asgi import Receive, RefusedError, Scope, header, next_part

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD = b"files"
_MAX_PARTS = 1000
_HEADER_BYTES = 8 << 10
logging.getLogger("python_multipart.multipart").setLevel(logging.ERROR)  # it warns of bytes after the end


@dataclass(frozen=True)
class Piece:
    """A file begins (``data`` is its name), goes on, or is whole."""

    kind: Literal["begin", "data", "end"]
    data: bytes = b""


async def pieces_of(scope: Scope, receive: Receive, check_size: Callable[[int], None]) -> AsyncIterator[Piece]:
    """The files as they arrive.

    Args:
        scope: the request.
        receive: where its body comes from.
        check_size: told how many bytes came so far; it raises when that is too much.

    Raises:
        RefusedError: no multipart body, a broken one, one that broke off or stalled.
    """
    found = _Found()
    parser = MultipartParser(_boundary(scope), found.callbacks())
    size, more = 0, True
    while more:
        part, more = await next_part(receive)
        size += len(part)
        check_size(size)
        await asyncio.to_thread(_feed, parser, part)
        for piece in found.taken():
            yield piece
    if not found.whole:
        raise RefusedError(400, "the upload broke off; send it again")


def _boundary(scope: Scope) -> bytes:
    kind, options = parse_options_header(header(scope, b"content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise RefusedError(400, "an upload must be multipart/form-data")
    return boundary


def _feed(parser: MultipartParser, part: bytes) -> None:
    try:
        parser.write(part)
    except MultipartParseError:
        raise RefusedError(400, "the upload is no proper multipart body") from None


class _Found:
    """What the parser found, waiting to be taken: its callbacks cannot wait for a disk."""

    def __init__(self) -> None:
        self.whole = False
        self._pieces: list[Piece] = []
        self._data: list[bytes] = []
        self._parts = self._header_bytes = 0
        self._name = self._value = self._disposition = b""
        self._in_file = False

    def callbacks(self) -> MultipartCallbacks:
        """For the parser."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._add,
            "on_part_end": self._close,
            "on_end": self._finish,
        }

    def taken(self) -> list[Piece]:
        """Everything since the last time; data that belongs together is one piece."""
        self._join()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin(self) -> None:
        self._parts += 1
        self._header_bytes = 0
        if self._parts > _MAX_PARTS:
            raise RefusedError(413, f"an upload may have {_MAX_PARTS} parts")
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _HEADER_BYTES:
            raise RefusedError(400, "the headers of a part are too long")

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._in_file = options.get(b"name") == FIELD and b"filename" in options
        if self._in_file:
            self._pieces.append(Piece("begin", options[b"filename"]))

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._data.append(data[start:end])

    def _close(self) -> None:
        self._join()
        if self._in_file:
            self._pieces.append(Piece("end"))
        self._in_file = False

    def _finish(self) -> None:
        self.whole = True

    def _join(self) -> None:
        if self._data:
            self._pieces.append(Piece("data", b"".join(self._data)))
            self._data = []
