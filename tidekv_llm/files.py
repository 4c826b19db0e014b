"""Files that are never half there, and folders for one user alone."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tidekv_llm.errors import CacheError


@contextmanager
def written_then_renamed(target: Path) -> Iterator[Path]:
    """A file beside ``target`` for this user alone, that takes its name once the block is through.

    Whoever is killed or fails in between leaves the old ``target`` as it was, and nothing else.
    """
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mode 0600
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o600)  # some writers make the file anew
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def private_folder(folder: Path) -> Path:
    """Make a folder for this user alone, or make one that is there private.

    Raises:
        CacheError: it is a link, or belongs to someone else.
    """
    if folder.is_symlink():
        raise CacheError(f"the folder {folder} is a symbolic link; put a folder of your own there")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise CacheError(f"the folder {folder} belongs to another user; set TIDEKV_CACHE to a folder of your own")
    if stat.S_IMODE(status.st_mode) != 0o700:  # whatever the umask has taken away, or somebody has given
        folder.chmod(0o700)
    return folder


def tree_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; links count as links, and files may vanish while it counts."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total
