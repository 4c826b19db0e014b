"""Files are whole or as they were; folders are one user's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tidekv_llm.errors import CacheError
from tidekv_llm.files import private_folder, tree_bytes, written_then_renamed


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("old", [None, "old"])
def test_a_written_file_takes_the_targets_place_and_is_private(tmp_path: Path, old: str | None) -> None:
    target = tmp_path / "a.json"
    if old is not None:
        target.write_text(old)
    with written_then_renamed(target) as partial:
        assert (target.read_text() if target.exists() else None) == old
        partial.unlink()  # as writers do that make the file anew
        partial.write_text("new")
    assert target.read_text() == "new"
    assert (mode(target), os.listdir(tmp_path)) == (0o600, ["a.json"])


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt()], ids=["full disk", "interrupt"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(type(error)), written_then_renamed(target) as partial:
        partial.write_text("half")
        raise error
    assert (target.read_text(), os.listdir(tmp_path)) == ("old", ["a.json"])


def test_a_missing_folder_is_an_os_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_then_renamed(tmp_path / "no" / "a"):
        pytest.fail("nothing can be written")


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_a_private_folder_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = private_folder(tmp_path / "mine")
    finally:
        os.umask(before)
    assert (folder, mode(folder)) == (tmp_path / "mine", 0o700)
    folder.chmod(0o755)
    assert mode(private_folder(folder)) == 0o700


def test_a_link_is_no_private_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CacheError, match="is a symbolic link"):
        private_folder(tmp_path / "link")


def test_a_folders_size_counts_what_is_in_it_and_nothing_outside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * 1000)
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"12345")
    (folder / "deep" / "b").write_bytes(b"123")
    assert tree_bytes(folder) == 8
    (folder / "link").symlink_to(outside)
    assert tree_bytes(folder) == 8 + len(str(outside))
    assert tree_bytes(tmp_path / "none") == 0
