"""What a process leaves behind: nothing.

Folders with users' documents are private and end with their process. A process that is killed cannot clean up, so
each folder holds a lock for as long as its process lives, and the next one that starts removes those without a holder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

if sys.platform != "win32":  # there folders end with their process too, but those of a killed one stay
    import fcntl

_LOCK = ".lock"


class PrivateFolder:
    """A folder that no other user can read, removed when it is closed.

    Args:
        prefix: how its name begins; folders of killed processes with that prefix are removed first.
        parent: where it is made; None for the system's folder for temporary files.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_abandoned(prefix, parent)
        self.path, self._lock = _made(prefix, parent)

    def close(self) -> None:
        """Remove the folder and everything in it; once is enough."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_abandoned(prefix: str, parent: Path) -> int:
    """Remove this user's folders below ``parent`` whose process is dead; returns how many."""
    if sys.platform == "win32":
        return 0
    return sum(_removed(folder) for folder in parent.glob(f"{prefix}*") if _is_ours(folder))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP end the program as an exception does, so that ``finally`` blocks run.

    A signal that the parent set to be ignored (``nohup``) stays ignored. Outside the main thread, which alone can
    have handlers, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _endings()} if main else {}
    taken = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in taken:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def _endings() -> list[signal.Signals]:
    return [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _end(number: int, _: FrameType | None) -> None:
    for other in _endings():  # a second signal must not break the cleaning up
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _made(prefix: str, parent: Path) -> tuple[Path, int]:
    """A new folder and its lock; another one where a process that is just starting took it for abandoned."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # mode 0700
        if sys.platform == "win32":
            return path, -1
        with contextlib.suppress(OSError):
            return path, _locked(path / _LOCK, os.O_RDWR | os.O_CREAT)


def _locked(path: Path, flags: int) -> int:
    """The descriptor of a lock that is ours for as long as it is open.

    Raises:
        OSError: there is no such file, or another process holds it.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), path.lstat()):
            raise FileNotFoundError(path)  # removed between opening and locking
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_ours(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()


def _removed(folder: Path) -> bool:
    try:
        descriptor = _locked(folder / _LOCK, os.O_RDWR)
    except FileNotFoundError:  # killed before it had a lock: nothing is in it
        with contextlib.suppress(OSError):
            folder.rmdir()
        return False
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
    return True
