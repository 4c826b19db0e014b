"""A store on disk: one safetensors file per layer, memory-mapped when read; private, checked, renamed into place.

    <root>/<digest>/meta.json                what it is, how many layers, their checksums
    <root>/<digest>/layer_000.safetensors    keys and values

A store is written under a temporary name and renamed when its last byte is on the disk: whoever is killed in
between leaves nothing that could be mistaken for a store. Folders are 0700 and files 0600.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.errors import CacheError, one_line
from tidekv_llm.files import private_folder
from tidekv_llm.prefixes.base import PrefixKey, StoredPrefix

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
META = "meta.json"
PARTIAL = ".partial"
# A temporary folder this old was left behind by a process that was killed.
_STALE_SECONDS = 24 * 3600
_READ_BYTES = 1 << 22


class DiskPrefix(StoredPrefix):
    """Keys and values in files.

    Args:
        key: see :class:`StoredPrefix`.
        token_ids: see :class:`StoredPrefix`.
        num_layers: see :class:`StoredPrefix`.
        root: folder that holds the stores; made private if it does not exist.

    Raises:
        CacheError: the disk is full or the folder cannot be written; nothing is left behind.
    """

    def __init__(self, key: PrefixKey, token_ids: Sequence[int], num_layers: int, *, root: Path) -> None:
        super().__init__(key, token_ids, num_layers)
        self._root = root
        self._folder = root / key.digest
        self._checksums: list[int] = []
        self._sizes: list[int] = []
        self._checked: dict[int, tuple[int, ...]] = {}  # layer to the file's state when it was checked
        self._partial: Path | None = None

    @classmethod
    def find(cls, key: PrefixKey, token_ids: Sequence[int], num_layers: int, *, root: Path) -> DiskPrefix | None:
        """The finished store for this key, or None.

        Raises:
            CacheError: it is damaged or was written for something else; it has been removed.
        """
        store = cls(key, token_ids, num_layers, root=root)
        if not os.path.lexists(store._folder):
            return None
        try:
            store._read_meta()
        except CacheError:
            remove(store._folder)
            raise
        store.complete = True
        with suppress(OSError):
            os.utime(store._folder)  # least recently used goes first
        return store

    @property
    def folder(self) -> Path:
        """Where the finished store lies."""
        return self._folder

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def save(self, layer: int, keys: Tensor, values: Tensor) -> None:
        from safetensors.torch import save_file

        with self._writing():
            file = self._partial_folder() / _name(layer)
            save_file({"keys": keys.cpu().contiguous(), "values": values.cpu().contiguous()}, file)
            file.chmod(0o600)
            self._sizes.append(file.stat().st_size)
            self._checksums.append(_checksum(file))

    def finish(self) -> None:
        meta = {
            "version": VERSION,
            "key": asdict(self.key),
            "length": self.length,
            "num_layers": self.num_layers,
            "sizes": self._sizes,
            "checksums": self._checksums,
        }
        with self._writing():
            partial = self._partial_folder()
            (partial / META).write_text(json.dumps(meta))
            (partial / META).chmod(0o600)
            _sync(partial)
            self._publish(partial)
            _sync_folder(self._root)
        self._partial = None
        super().finish()

    def load(self, layer: int) -> tuple[Tensor, Tensor]:
        from safetensors import SafetensorError, safe_open

        file = self._folder / _name(layer)
        try:
            self._check(layer, file)
            with safe_open(file, framework="pt") as tensors:
                keys, values = tensors.get_tensor("keys"), tensors.get_tensor("values")
        except (OSError, SafetensorError) as error:
            raise CacheError(f"the stored document cannot be read ({type(error).__name__}) in layer {layer}") from error
        if keys.shape[2] != self.length or values.shape[2] != self.length:
            raise CacheError(f"the stored document has another length in layer {layer}")
        return keys, values

    def _check(self, layer: int, file: Path) -> None:
        """Compare a file with its checksum, once, and again whenever it has been touched."""
        state = _file_state(file)
        if self._checked.get(layer) == state:
            return
        if file.stat().st_size != self._sizes[layer] or _checksum(file) != self._checksums[layer]:
            raise CacheError(f"the stored document is damaged in layer {layer}")
        self._checked[layer] = state

    def _publish(self, partial: Path) -> None:
        """Give the finished folder its name, unless another process was quicker: its content is the same."""
        for _ in range(2):
            try:
                partial.rename(self._folder)
            except OSError:
                with suppress(CacheError):  # damaged and removed: the name is free now
                    other = DiskPrefix.find(self.key, self.token_ids, self.num_layers, root=self._root)
                    if other is None:
                        raise
                    self._sizes, self._checksums, self._checked = other._sizes, other._checksums, {}
                    remove(partial)
                    return
            else:
                # Written by this process just now: no need to read it all again.
                self._checked = {layer: _file_state(self._folder / _name(layer)) for layer in range(self.num_layers)}
                return
        raise CacheError(f"the document could not be stored ({self._folder.name} is in the way)")

    def discard(self) -> None:
        if self._partial is not None:
            remove(self._partial)
            self._partial = None
        if self.complete:
            remove(self._folder)
        self.complete = False
        self._sizes, self._checksums, self._checked = [], [], {}

    def _partial_folder(self) -> Path:
        if self._partial is None:
            sweep(private_folder(self._root))
            self._partial = private_folder(
                self._root / f"{self.key.digest}.{os.getpid()}-{time.monotonic_ns()}{PARTIAL}"
            )
        return self._partial

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.discard()
            if isinstance(error, OSError) or "No space left" in str(error) or "I/O error" in str(error):
                said = getattr(error, "strerror", None) or one_line(str(error))
                raise CacheError(
                    f"the document could not be stored ({said}); free disk space or use store='memory'"
                ) from error
            raise

    def _read_meta(self) -> None:
        if self._folder.is_symlink() or not self._folder.is_dir():
            raise CacheError(f"the stored document {self._folder.name} is not a folder of this program")
        try:
            meta: dict[str, Any] = json.loads((self._folder / META).read_text())
            same = (meta["version"], meta["key"], meta["length"], meta["num_layers"])
            self._sizes = [int(size) for size in meta["sizes"]]
            self._checksums = [int(checksum) for checksum in meta["checksums"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(f"the stored document {self._folder.name} has no readable description") from error
        if same != (VERSION, asdict(self.key), self.length, self.num_layers):
            raise CacheError(f"the stored document {self._folder.name} was written for something else")
        if not len(self._sizes) == len(self._checksums) == self.num_layers:
            raise CacheError(f"the stored document {self._folder.name} is incomplete")
        for layer, size in enumerate(self._sizes):
            file = self._folder / _name(layer)
            if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
                raise CacheError(f"the stored document is damaged in layer {layer}")


def remove(path: Path) -> None:
    """Delete a store's folder; a link or a file in its place goes, what it points to stays."""
    if path.is_symlink() or path.is_file():
        with suppress(OSError):
            path.unlink()
    else:
        # Without its description it is no store any more, however far the rest of the deletion gets.
        with suppress(OSError):
            (path / META).unlink()
        shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what killed processes left behind."""
    for folder in root.glob(f"*{PARTIAL}"):
        with suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _STALE_SECONDS or not _alive(folder.name):
                remove(folder)


def _alive(name: str) -> bool:
    """Whether the process that writes ``digest.PID-number.partial`` still runs."""
    try:
        os.kill(int(name.split(".")[-2].split("-")[0]), 0)
    except (ProcessLookupError, ValueError, IndexError):
        return False
    except PermissionError:
        pass
    return True


def _name(layer: int) -> str:
    return f"layer_{layer:03d}.safetensors"


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def _file_state(file: Path) -> tuple[int, ...]:
    """What changes when somebody writes to a file or puts another one in its place."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sync(folder: Path) -> None:
    """Wait until the files' bytes are on the disk: a rename must not overtake them."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows opens no folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
