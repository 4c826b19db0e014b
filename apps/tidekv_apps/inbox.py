"""Uploaded files that wait to be added: written and counted as they arrive, gone if nobody adds them.

The caller gets a name for each file, never a path of this machine, and only its owner can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tidekv_apps.asgi import Receive, RefusedError, Scope, Send, header
from tidekv_apps.multipart import Piece, pieces_of
from tidekv_apps.security import safe_name
from tidekv_apps.settings import Limits

_OVERHEAD_BYTES = 64 << 10  # multipart headers of one request
_LOOK_SECONDS = 0.1
_UNKNOWN_SECONDS = 3.0
_DEPTH = 40


@dataclass
class Upload:
    """One file.

    Attributes:
        owner: whose.
        address: where it came from.
        name: as the user called it, made safe to show and to be a file's name.
        path: where it lies, in a folder of its own.
        born: when its first byte came.
        size: bytes so far.
        whole: all of it is here.
    """

    owner: str
    address: str
    name: str
    path: Path
    born: float
    size: int = 0
    whole: bool = False


class Inbox:
    """The upload folder and the account of what is in it.

    Args:
        folder: where the files go.
        limits: how many, how large, how long.
        clock: seconds that only grow.
    """

    def __init__(self, folder: Path, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._limits, self._clock = folder, limits, clock
        self._uploads: dict[str, Upload] = {}
        self._arriving: dict[tuple[str, str], list[tuple[str, int]]] = {}
        self._lock = threading.RLock()  # a thread sweeps
        self.stored_bytes = 0

    def __len__(self) -> int:
        return len(self._uploads)

    # --- arriving ---------------------------------------------------------------------------------------

    async def take(self, owner: str, address: str, scope: Scope, receive: Receive, upload_id: str = "") -> list[str]:
        """Keep the files of a multipart body; returns their names for the caller.

        Raises:
            RefusedError: too large, too many, no form, too slow, or broken off. Nothing of it is kept then.
        """
        told: list[tuple[str, int]] = []
        arrival = _Arrival(self, owner, address, told)
        if upload_id:
            self._arriving[owner, upload_id] = told
        try:
            await asyncio.to_thread(self.sweep)
            self._check_size(_number(header(scope, b"content-length")))
            async with asyncio.timeout(self._limits.upload_seconds):
                async for piece in pieces_of(scope, receive, self._check_size):
                    await arrival.take(piece)
        except BaseException as error:
            arrival.close()
            await asyncio.to_thread(self._drop, arrival.names)
            raise _explained(error) from None
        finally:
            self._arriving.pop((owner, upload_id), None)
        return arrival.names

    def _check_size(self, size: int) -> None:
        if size > self._limits.visit_bytes + _OVERHEAD_BYTES:
            raise RefusedError(413, f"an upload may have {self._limits.visit_bytes >> 20} MiB; send less at once")
        if self.stored_bytes >= self._limits.upload_folder_bytes:
            raise RefusedError(507, "the server's upload folder is full; try again later", 60)

    def open(self, owner: str, address: str, name: str) -> str:
        """A place for a new file.

        Raises:
            RefusedError: too many files wait already, of the owner, of the address or in all.
        """
        with self._lock:
            self._check_count(owner, address)
            folder = self._folder / secrets.token_hex(16)
            folder.mkdir(mode=0o700)
            upload = Upload(owner, address, name, folder / name, self._clock())
            self._uploads[_key(upload.path)] = upload
        return _key(upload.path)

    def _check_count(self, owner: str, address: str) -> None:
        limits, uploads = self._limits, self._uploads.values()
        if sum(upload.owner == owner for upload in uploads) >= 2 * limits.files:
            raise RefusedError(429, "too many files of yours wait to be added; add them first", 60)
        of_address = sum(upload.address == address for upload in uploads)
        if len(uploads) >= limits.uploads or of_address >= max(1, limits.uploads // 2):
            raise RefusedError(507, "too many uploaded files wait to be added; try again later", 60)

    def grow(self, key: str, size: int) -> Upload:
        """Count bytes of a file that are about to be written.

        Raises:
            RefusedError: the file, the owner's files or all files become too large.
        """
        limits, upload = self._limits, self._uploads[key]
        with self._lock:
            of_owner = sum(other.size for other in self._uploads.values() if other.owner == upload.owner)
            if upload.size + size > limits.file_bytes:
                raise RefusedError(413, f"files of more than {limits.file_bytes >> 20} MiB are not taken")
            if of_owner + size > 2 * limits.visit_bytes:
                raise RefusedError(429, "too much of yours waits to be added; add it first", 60)
            if self.stored_bytes + size > limits.upload_folder_bytes:
                raise RefusedError(507, "the server's upload folder is full; try again later", 60)
            upload.size += size
            self.stored_bytes += size
        return upload

    def finish(self, key: str) -> None:
        """All bytes of a file are there: now it can be added."""
        self._uploads[key].whole = True

    # --- waiting ----------------------------------------------------------------------------------------

    def real_paths(self, owner: str, value: Any, depth: int = 0) -> Any:
        """A copy of a request's value in which the names of the owner's own files are their paths.

        Raises:
            RefusedError: a file is named that the owner did not upload, or that is not here any more.
        """
        if depth > _DEPTH:
            raise RefusedError(400, "the request is nested too deeply")
        if isinstance(value, list):
            return [self.real_paths(owner, inner, depth + 1) for inner in value]
        if not isinstance(value, dict):
            return value
        if "path" not in value:
            return {name: self.real_paths(owner, inner, depth + 1) for name, inner in value.items()}
        upload = self._uploads.get(value["path"]) if isinstance(value["path"], str) else None
        if upload is None or upload.owner != owner or not upload.whole:
            raise RefusedError(400, "that file was not uploaded here; choose it again")
        return {"path": str(upload.path), "orig_name": upload.name, "meta": {"_type": "gradio.FileData"}}

    def sweep(self) -> int:
        """Remove what waited too long, and forget what was taken out of its folder; returns how many files."""
        with self._lock:
            uploads = list(self._uploads.items())
        over = [key for key, upload in uploads if upload.whole and self._is_over(upload)]
        self._drop(over)
        return len(over)

    def _is_over(self, upload: Upload) -> bool:
        return self._clock() - upload.born > self._limits.upload_seconds or not upload.path.exists()

    def _drop(self, keys: list[str]) -> None:
        for key in keys:
            with self._lock:
                upload = self._uploads.pop(key, None)
                self.stored_bytes -= upload.size if upload is not None else 0
            if upload is not None:
                shutil.rmtree(upload.path.parent, ignore_errors=True)

    # --- progress ---------------------------------------------------------------------------------------

    async def tell_progress(self, owner: str, upload_id: str, send: Send) -> None:
        """Server-sent events in the words of Gradio's page: how many bytes of which file came since the last one.

        An upload that is not on its way, or not the owner's, is done: a small one often ends before the page listens.
        """
        told = await self._announced(owner, upload_id)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        seen = 0
        while self._arriving.get((owner, upload_id)) is told:
            for name, size in told[seen:]:
                await _send_event(send, {"msg": "update", "orig_name": name, "chunk_size": size})
            seen = len(told)
            await asyncio.sleep(_LOOK_SECONDS)
        await _send_event(send, {"msg": "done"})
        await send({"type": "http.response.body", "body": b""})

    async def _announced(self, owner: str, upload_id: str) -> list[tuple[str, int]]:
        """The page listens before its upload begins; a list of its own for one that does not come."""
        for _ in range(round(_UNKNOWN_SECONDS / _LOOK_SECONDS)):
            told = self._arriving.get((owner, upload_id))
            if told is not None:
                return told
            await asyncio.sleep(_LOOK_SECONDS)
        return []


class _Arrival:
    """Writes the pieces of one request into files."""

    def __init__(self, inbox: Inbox, owner: str, address: str, told: list[tuple[str, int]]) -> None:
        self._inbox, self._owner, self._address, self._told = inbox, owner, address, told
        self._file: BinaryIO | None = None
        self.names: list[str] = []

    async def take(self, piece: Piece) -> None:
        if piece.kind == "begin":
            name = safe_name(piece.data.decode("utf-8", "replace"))
            self.names.append(self._inbox.open(self._owner, self._address, name))
            self._file = self._inbox.grow(self.names[-1], 0).path.open("xb")
        elif piece.kind == "data" and self._file is not None:
            upload = self._inbox.grow(self.names[-1], len(piece.data))
            self._told.append((upload.name, len(piece.data)))
            await asyncio.to_thread(self._file.write, piece.data)
        elif piece.kind == "end":
            self.close()
            self._inbox.finish(self.names[-1])

    def close(self) -> None:
        """Nothing is written any more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _explained(error: BaseException) -> BaseException:
    """What the caller is told of an upload that failed."""
    if isinstance(error, TimeoutError):
        return RefusedError(408, "the upload took too long; send smaller files")
    if isinstance(error, OSError):
        return RefusedError(507, "the server cannot store the file; try again later")
    return error


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


async def _send_event(send: Send, data: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": f"data: {json.dumps(data)}\n\n".encode(), "more_body": True})
