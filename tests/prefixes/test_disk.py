"""Stores on disk: private, complete or absent, checked, and never used when in doubt."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.sessions_for_tests import assert_same, document, engine, follow_up, fresh
from tidekv_llm.errors import CacheError, ConfigError
from tidekv_llm.files import private_folder
from tidekv_llm.prefixes import disk
from tidekv_llm.prefixes.base import PrefixKey, digest_ids
from tidekv_llm.prefixes.disk import META, DiskPrefix, sweep
from tidekv_llm.prefixes.named import list_sessions, remove_session, session_folder, sessions_root

IDS = tuple(range(20))
KEY = PrefixKey("model", "numerics", digest_ids(IDS))
LAYERS = 3


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEKV_CACHE", str(tmp_path / "cache"))


def layer_of(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    keys = torch.randn(1, 2, 30, 4, generator=generator)[:, :, :20]  # a view, as in the active layer
    return keys, torch.randn(1, 2, 20, 4, generator=generator)


def written(root: Path) -> DiskPrefix:
    store = DiskPrefix(KEY, IDS, LAYERS, root=root)
    for index in range(LAYERS):
        store.save(index, *layer_of(index))
    store.finish()
    return store


def found(root: Path) -> DiskPrefix | None:
    return DiskPrefix.find(KEY, IDS, LAYERS, root=root)


def test_what_was_written_comes_back_to_the_bit(tmp_path: Path) -> None:
    written(tmp_path / "s")
    store = found(tmp_path / "s")
    assert store is not None
    for index in range(LAYERS):
        for got, expected in zip(store.load(index), layer_of(index), strict=True):
            assert torch.equal(got, expected)
    assert store.nbytes > LAYERS * 2 * 2 * 20 * 4 * 4
    store.discard()
    assert found(tmp_path / "s") is None


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_folders_are_0700_and_files_0600_under_any_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        root = tmp_path / "s"
        written(root)
    finally:
        os.umask(before)
    for path in (root, *root.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    root.chmod(0o755)
    private_folder(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def flip(file: Path, at: int = -5) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def change_meta(folder: Path, **changes: object) -> None:
    meta = json.loads((folder / META).read_text())
    (folder / META).write_text(json.dumps({**meta, **changes}))


def link_layer(folder: Path) -> None:
    file = folder / "layer_001.safetensors"
    elsewhere = folder.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


DAMAGE = {
    "bit flipped": lambda folder: flip(folder / "layer_001.safetensors"),
    "header flipped": lambda folder: flip(folder / "layer_000.safetensors", 3),
    "truncated": lambda folder: os.truncate(folder / "layer_002.safetensors", 100),
    "empty": lambda folder: os.truncate(folder / "layer_000.safetensors", 0),
    "missing": lambda folder: (folder / "layer_001.safetensors").unlink(),
    "layers swapped": lambda folder: (folder / "layer_000.safetensors").replace(folder / "layer_001.safetensors"),
    "a link": link_layer,
    "no description": lambda folder: (folder / META).unlink(),
    "garbled description": lambda folder: flip(folder / META, 1),
    "description is a list": lambda folder: (folder / META).write_text("[]"),
    "checksum wrong": lambda folder: change_meta(folder, checksums=[1, 2, 3]),
    "too few layers": lambda folder: change_meta(folder, sizes=[1]),
    "newer version": lambda folder: change_meta(folder, version=2),
    "another model's": lambda folder: change_meta(
        folder, key={"model": "other", "numerics": "numerics", "token_ids": KEY.token_ids}
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_detected_and_never_used(tmp_path: Path, damage: str) -> None:
    root = tmp_path / "s"
    DAMAGE[damage](written(root).folder)
    try:
        store = found(root)
        assert store is not None
    except CacheError:
        assert found(root) is None  # removed, so that it can be written anew
        return
    with pytest.raises(CacheError, match=r"damaged|cannot be read"):
        for index in range(LAYERS):
            for got, expected in zip(store.load(index), layer_of(index), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.parametrize("damage", ["bit flipped", "truncated", "missing", "another model's", "no description"])
def test_a_session_reads_a_damaged_document_again_and_says_so(damage: str) -> None:
    with engine().open(document(), store="disk", name="d") as session:
        session.ingest()
    (folder,) = session_folder("d").iterdir()
    DAMAGE[damage](folder)
    with engine().open(document(), store="disk", name="d") as session:
        again = follow_up(session, "Why?")
        assert again.metrics.reused_prefix_tokens == 0
        assert [note for note in again.metrics.notes if "read again" in note]
        assert_same(again, fresh(session, "Why?"))
        later = follow_up(session, "Why not?")
        assert (later.metrics.notes, later.metrics.reused_prefix_tokens) == ([], session.document_tokens)
        flip(folder / "layer_001.safetensors")  # after it has been checked
        assert any("damaged in layer 1" in note for note in follow_up(session, "Why?").metrics.notes)


def test_a_session_removed_meanwhile_is_read_again() -> None:
    with engine().open(document(), store="disk", name="d") as session:
        session.ingest()
        remove_session("d")
        again = follow_up(session, "Why?")
        assert any("read again" in note for note in again.metrics.notes)
        assert_same(again, fresh(session, "Why?"))
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens > 0


def test_other_weights_dtypes_settings_and_chunk_sizes_get_stores_of_their_own() -> None:
    def reused(llm: object) -> int:
        with llm.open(document(), store="disk", name="d") as session:  # type: ignore[attr-defined]
            got = follow_up(session, "Why?")
            assert_same(got, fresh(session, "Why?"))
            return got.metrics.reused_prefix_tokens

    assert reused(engine()) == 0
    assert reused(engine()) > 0
    fine_tuned = engine()
    with torch.no_grad():  # the embedding and all shapes stay
        fine_tuned.model.model.layers[1].mlp.up_proj.weight.add_(0.01)
    assert reused(fine_tuned) == 0
    assert reused(engine(seed=1)) == 0
    assert reused(engine(rms_norm_eps=1e-3)) == 0
    assert reused(engine().with_prefill(chunk_size=40)) == 0
    half = engine()
    half.model.to(torch.bfloat16)
    assert reused(half) == 0


def test_an_automatic_chunk_size_goes_on_with_the_one_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine().with_prefill(chunk_size="auto")
    monkeypatch.setattr("tidekv_llm.engine.run.choose_chunk_size", lambda *_: 256)
    with llm.open(document(), store="disk") as session:
        session.ingest()
    monkeypatch.setattr("tidekv_llm.engine.run.choose_chunk_size", lambda *_: 128)
    with llm.open(document(), store="disk") as session:
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens == session.document_tokens


# --- full disks, killed and concurrent processes --------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_loses_nothing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEKV_CACHE", str(small_disk))
    with engine().open(document(800), store="disk") as session:
        for _ in range(2):
            got = follow_up(session, "Why?")
            assert any("could not be stored (" in note and "free disk space" in note for note in got.metrics.notes)
            assert_same(got, fresh(session, "Why?"))
            assert session.store_bytes == 0
            assert not [path for path in small_disk.rglob("*") if path.is_file()]


@pytest.mark.parametrize("failing", ["_checksum", "_sync", "save_file"])
def test_a_writer_that_fails_leaves_nothing(failing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    target = "safetensors.torch.save_file" if failing == "save_file" else f"tidekv_llm.prefixes.disk.{failing}"
    with engine().open(document(), store="disk") as session:
        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            got = follow_up(session, "Why?")
        assert any("No space left" in note for note in got.metrics.notes)
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens == 0
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens > 0


CHILD = """
import os, signal, sys
import tidekv_llm.prefixes.disk as disk
from tests.sessions_for_tests import document, engine, follow_up
what = sys.argv[1]

def dead(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

llm = engine()
with llm.open(document(), store="disk", name="killed") as session:
    if what == "ingest":  # in the middle of the second layer
        session.ingest(progress=lambda step: dead() if step.layer == 2 and step.chunk == 2 else None)
    elif what == "sync":  # all files written, not yet renamed
        disk._sync = dead
    elif what == "file":  # half a layer on the disk
        import safetensors.torch
        def half(tensors, path):
            path.write_bytes(b"half")
            dead()
        safetensors.torch.save_file = half
    elif what == "remove":
        disk.shutil.rmtree = dead
        session.ingest()
        session._prefix._store.discard()
    got = follow_up(session, "Why?")
    print(got.metrics.reused_prefix_tokens, got.logits.sum().item().hex(), got.metrics.notes)
"""


def child(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        },
    )


@pytest.mark.parametrize("what", ["ingest", "sync", "file", "remove"])
def test_a_killed_process_leaves_no_store_and_its_remains_are_swept(what: str) -> None:
    process = child(what)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    with engine().open(document(), store="disk", name="killed") as session:
        root = session_folder("killed")
        assert not list(root.glob("*.partial"))
        got = follow_up(session, "Why?")
        assert got.metrics.reused_prefix_tokens == 0
        assert_same(got, fresh(session, "Why?"))
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens > 0


def test_two_processes_on_one_store_and_a_restart() -> None:
    both = [child("ask"), child("ask")]
    lines = []
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        lines.append(out.split())
    with engine().open(document(), store="disk", name="killed") as session:
        later = follow_up(session, "Why?")
        # written by another process, and the same to the bit as computed in this one
        assert later.metrics.reused_prefix_tokens == session.document_tokens
        assert_same(later, fresh(session, "Why?"))
        assert {line[1] for line in lines} == {later.logits.sum().item().hex()}
        assert len(list(session_folder("killed").iterdir())) == 1


def test_whoever_finishes_second_uses_the_store_of_the_first(tmp_path: Path) -> None:
    root = tmp_path / "s"
    slow = DiskPrefix(KEY, IDS, LAYERS, root=root)
    for index in range(LAYERS):
        slow.save(index, *layer_of(index))
    written(root)
    slow.finish()
    assert torch.equal(slow.load(1)[0], layer_of(1)[0])
    assert len(list(root.iterdir())) == 1


def test_the_second_replaces_a_damaged_store_of_the_first(tmp_path: Path) -> None:
    root = tmp_path / "s"
    slow = DiskPrefix(KEY, IDS, LAYERS, root=root)
    for index in range(LAYERS):
        slow.save(index, *layer_of(index))
    DAMAGE["truncated"](written(root).folder)
    slow.finish()
    assert torch.equal(slow.load(2)[0], layer_of(2)[0])


def test_sweeping_spares_the_living(tmp_path: Path) -> None:
    mine, dead, foreign, old = (
        tmp_path / f"x.{name}.partial" for name in (f"{os.getpid()}-1", "999999999-1", "odd", f"{os.getpid()}-2")
    )
    for folder in (mine, dead, foreign, old):
        folder.mkdir()
    os.utime(old, (time.time() - 2 * disk._STALE_SECONDS,) * 2)
    sweep(tmp_path)
    assert list(tmp_path.glob("*.partial")) == [mine]


# --- links ----------------------------------------------------------------------------------------------


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o755)
    (precious / "letter.txt").write_text("dear")
    (sessions_root() / "linked").symlink_to(precious)
    with pytest.raises(CacheError, match="symbolic link"):
        session_folder("linked")
    with pytest.raises(CacheError, match="no session called 'linked'"):
        remove_session("linked")
    assert list_sessions() == []
    with engine().open(document(), store="disk", name="d") as session:
        session.ingest()
        (folder,) = session_folder("d").iterdir()
    disk.remove(folder)
    folder.symlink_to(precious)
    (folder.parent / "y.1-1.partial").symlink_to(precious)
    with engine().open(document(), store="disk", name="d") as session:
        assert any("not a folder of this program" in note for note in follow_up(session, "Why?").metrics.notes)
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens > 0
    remove_session("d")
    assert (precious / "letter.txt").read_text() == "dear"
    assert stat.S_IMODE(precious.stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a\0b", "x" * 65, "é", " "])
def test_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="session name"):
        session_folder(name)
    with pytest.raises(ConfigError, match="session name"):
        remove_session(name)
    assert sessions_root().is_dir()


# --- limits and lists -----------------------------------------------------------------------------------


def test_files_above_the_limit_go_least_recently_used_first() -> None:
    llm = engine()
    sizes = []
    for index in range(3):
        with llm.open(document(seed=index), store="disk", name=f"s{index}") as session:
            session.ingest()
            sizes.append(session.store_bytes)
        os.utime(next(session_folder(f"s{index}").iterdir()), (index + 1, index + 1))
    assert [one.name for one in list_sessions()][-1] in ("s0", "s1", "s2")
    assert {one.tokens > 0 and one.documents == 1 for one in list_sessions()} == {True}
    with llm.open(document(seed=3), store="disk", name="s3", limit_bytes=int(2.5 * sizes[0])) as session:
        session.ingest()
        assert follow_up(session, "Why?").metrics.reused_prefix_tokens > 0
    assert {one.name for one in list_sessions() if one.documents} == {"s2", "s3"}
    assert remove_session("s3") > 0
    assert "s3" not in {one.name for one in list_sessions()}
    with pytest.raises(CacheError, match="no session called 's3'; there are: "):
        remove_session("s3")
