"""What is free: devices, and the tightest cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidekv_llm.memory import available_bytes, free


def test_available_memory_is_positive_and_no_more_than_there_is():
    import psutil

    assert 0 < available_bytes() <= psutil.virtual_memory().total


def write_group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def v2(limit: object, usage: int, cache: int = 0) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": usage, "memory.stat": f"anon 5\ninactive_file {cache}"}


def v1(limit: int, usage: int, cache: int = 0) -> dict[str, object]:
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": usage,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}",
    }


def cgroup_free(tmp_path: Path, membership: str) -> int | None:
    (tmp_path / "cgroup").write_text(membership)
    return free._cgroup_free_bytes(tmp_path / "cgroup", tmp_path / "fs")


def test_cgroup_v2_limit_counts_reclaimable_cache_as_free(tmp_path):
    write_group(tmp_path / "fs/app", v2(1000, 700, cache=200))
    assert cgroup_free(tmp_path, "0::/app\n") == 500


def test_the_tightest_cgroup_above_holds(tmp_path):
    write_group(tmp_path / "fs/a/b", v2("max", 700))
    write_group(tmp_path / "fs/a", v2(900, 700))
    assert cgroup_free(tmp_path, "0::/a/b\n") == 200


def test_cgroup_v1_limit(tmp_path):
    write_group(tmp_path / "fs/memory/app", v1(1000, 400, cache=100))
    write_group(tmp_path / "fs/memory", v1(2**63 - 4096, 400))
    assert cgroup_free(tmp_path, "9:name=systemd:/\n4:memory:/app\n0::/\n") == 700


def test_a_container_that_shows_the_hosts_path_is_read_at_its_root(tmp_path):
    write_group(tmp_path / "fs", v2(1000, 400))
    assert cgroup_free(tmp_path, "0::/docker/0123abc\n") == 600


@pytest.mark.parametrize("membership", ["", "0::/none\n", "2:cpu:/x\n"])
def test_no_limit_is_no_answer(tmp_path, membership):
    assert cgroup_free(tmp_path, membership) is None


def test_usage_over_the_limit_leaves_nothing(tmp_path):
    write_group(tmp_path / "fs/app", v2(1000, 1200))
    assert cgroup_free(tmp_path, "0::/app\n") == 0


def test_no_cgroup_files_at_all(tmp_path):
    assert free._cgroup_free_bytes(tmp_path / "missing", tmp_path) is None


def test_available_cuda_memory(cuda):
    assert available_bytes("cuda:0") == 1000
    assert available_bytes(["cuda:0", "cuda:1"]) == 1050
