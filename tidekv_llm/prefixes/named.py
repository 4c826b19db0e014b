"""Named sessions on disk: where they are, what they hold, how they go."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tidekv_llm.errors import CacheError, ConfigError
from tidekv_llm.files import private_folder, tree_bytes
from tidekv_llm.models.embedded import cache_root
from tidekv_llm.prefixes.disk import META, PARTIAL, remove, sweep

DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class StoredSession:
    """One line of ``tidekv sessions list``.

    Attributes:
        name: of the session.
        documents: stored document parts.
        tokens: their tokens together.
        bytes: on disk.
        used: last use, seconds since the epoch.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    used: float


def sessions_root() -> Path:
    """The folder of all named sessions, private to this user."""
    return private_folder(cache_root() / "sessions")


def session_folder(name: str | None) -> Path:
    """The folder of one session.

    Raises:
        ConfigError: the name has characters that do not belong in a file name.
    """
    folder = private_folder(sessions_root() / _checked(DEFAULT_NAME if name is None else name))
    sweep(folder)
    return folder


def _checked(name: str) -> str:
    """The name itself, if it is one: no path leads out of the sessions' folder."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"session name {name[:80]!r} may have letters, digits, '.', '_' and '-' only, at most 64; choose another"
        )
    return name


def list_sessions() -> list[StoredSession]:
    """All named sessions, the most recently used first."""
    found = [_look(folder) for folder in _folders(sessions_root())]
    return sorted(found, key=lambda session: session.used, reverse=True)


def remove_session(name: str) -> int:
    """Delete a session's files; returns the bytes freed.

    Raises:
        ConfigError: the name has characters that do not belong in a file name.
        CacheError: there is no such session.
    """
    folder = sessions_root() / _checked(name)
    if folder.is_symlink() or not folder.is_dir():
        names = ", ".join(session.name for session in list_sessions()) or "none"
        raise CacheError(f"no session called {name[:80]!r}; there are: {names}")
    size = _look(folder).bytes
    shutil.rmtree(folder)
    return size


def shrink(limit_bytes: int, keep: Path) -> None:
    """Delete stored documents of all sessions, the least recently used first, until they fit; not ``keep``."""
    stores = [store for session in _folders(sessions_root()) for store in _folders(session) if store != keep]
    stores = sorted((store for store in stores if store.suffix != PARTIAL), key=_used)
    total = tree_bytes(keep) + sum(tree_bytes(store) for store in stores)
    for store in stores:
        if total <= limit_bytes:
            break
        total -= tree_bytes(store)
        remove(store)


def _look(folder: Path) -> StoredSession:
    sweep(folder)
    tokens = documents = size = 0
    used = _used(folder)
    for store in _folders(folder):
        size += tree_bytes(store)
        try:
            tokens += int(json.loads((store / META).read_text())["length"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or damaged: it has bytes but no tokens
        documents += 1
        used = max(used, _used(store))
    return StoredSession(folder.name, documents, tokens, size, used)


def _folders(root: Path) -> list[Path]:
    """The real folders in a folder: what a link points to is none of ours."""
    return [each for each in root.iterdir() if each.is_dir() and not each.is_symlink()]


def _used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # just deleted
        return 0.0
