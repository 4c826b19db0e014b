"""Named sessions on disk: where they are, what they hold, how they go."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tidekv_llm.errors import CacheError, ConfigError
from tidekv_llm.models.embedded import cache_root
from tidekv_llm.store.disk import META, make_private

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
    root = cache_root() / "sessions"
    make_private(root)
    return root


def session_folder(name: str | None) -> Path:
    """The folder of one session.

    Raises:
        ConfigError: the name has characters that do not belong in a file name.
    """
    name = DEFAULT_NAME if name is None else name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"session name {name[:80]!r} may have letters, digits, '.', '_' and '-' only, at most 64; choose another"
        )
    folder = sessions_root() / name
    make_private(folder)
    return folder


def list_sessions() -> list[StoredSession]:
    """All named sessions, the most recently used first."""
    found = [_look(folder) for folder in sessions_root().iterdir() if folder.is_dir()]
    return sorted(found, key=lambda session: session.used, reverse=True)


def remove_session(name: str) -> int:
    """Delete a session's files; returns the bytes freed.

    Raises:
        CacheError: there is no such session.
    """
    folder = sessions_root() / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        names = ", ".join(session.name for session in list_sessions()) or "none"
        raise CacheError(f"no session called {name[:80]!r}; there are: {names}")
    size = _look(folder).bytes
    shutil.rmtree(folder)
    return size


def _look(folder: Path) -> StoredSession:
    tokens = documents = size = 0
    used = folder.stat().st_mtime
    for store in folder.iterdir():
        if not store.is_dir():
            continue
        size += sum(file.stat().st_size for file in store.iterdir())
        try:
            tokens += int(json.loads((store / META).read_text())["length"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # being written, or damaged: it has bytes but no tokens
        documents += 1
        used = max(used, store.stat().st_mtime)
    return StoredSession(folder.name, documents, tokens, size, used)
