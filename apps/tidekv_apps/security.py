"""What keeps strangers out: response headers, where to listen, file names and paths, what an error tells."""

from __future__ import annotations

import ipaddress
import logging
import secrets
from pathlib import Path

from tidekv_llm.errors import ConfigError, DocumentError, TideKVError

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",  # Gradio's front end needs all three
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'self'",
        "object-src 'none'",
        "frame-ancestors 'self'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
_log = logging.getLogger("tidekv_apps")


# --- where to listen ------------------------------------------------------------------------------------


def check_bind(host: str, auth: tuple[str, str] | None) -> None:
    """Refuse an address that others can reach unless there is a login.

    Raises:
        ConfigError: such an address and no ``--auth``.
    """
    if auth is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached by others; add --auth USER:PASSWORD or $TIDEKV_APP_AUTH")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_auth(text: str | None) -> tuple[str, str] | None:
    """``user:password`` as a pair.

    Raises:
        ConfigError: no colon, no user, or a password below eight characters.
    """
    if not text:
        return None
    user, colon, password = text.partition(":")
    if not colon or not user or len(password) < 8:
        raise ConfigError("--auth must be USER:PASSWORD with a password of at least 8 characters")
    return user, password


# --- files ----------------------------------------------------------------------------------------------


def check_upload_path(path: str, uploads: Path) -> Path:
    """The real path of an uploaded file, which must lie in the upload folder.

    Raises:
        DocumentError: it does not; the message does not tell whether such a file exists.
    """
    try:
        real = Path(path).resolve(strict=True)
        inside = real.is_file() and uploads.resolve() in real.parents
    except (OSError, ValueError, RuntimeError, TypeError):
        inside = False
    if not inside:
        raise DocumentError("that file was not uploaded here; choose it again")
    return real


def safe_name(name: str) -> str:
    """A file name to show and to store: no folders, no control or direction characters, at most 120 characters."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    plain = "".join(c for c in last if c.isprintable() and c not in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2069")
    short = plain.strip(" .")[-120:].encode(errors="ignore")[-200:]  # a file system counts bytes: 255 of them
    return short.decode(errors="ignore").strip(" .") or "document"


# --- messages -------------------------------------------------------------------------------------------


def plain_error(error: BaseException) -> str:
    """What the user may read: our own one-line errors as they are, others without traceback or path."""
    if isinstance(error, TideKVError):
        return str(error)
    reference = secrets.token_hex(3)
    _log.error("internal error %s", reference, exc_info=error)
    return f"something went wrong here (reference {reference}); try again, and tell the operator if it stays"
