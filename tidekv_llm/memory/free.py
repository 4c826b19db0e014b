"""How much memory can still be taken, on a CUDA device or within the cgroups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidekv_llm.memory.probes import cuda_devices


def available_bytes(device: object = "cpu") -> int:
    """Bytes that can still be taken on a device: free CUDA memory, or RAM within the cgroup's limit."""
    cuda = cuda_devices(device)
    if cuda:
        import torch

        return sum(torch.cuda.mem_get_info(one)[0] for one in cuda)
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _cgroup_free_bytes()
    return free if limit is None else min(free, limit)


def reusable_bytes(device: object = "cpu") -> int:
    """What torch's CUDA allocator has reserved but does not use: free for us, though the driver counts it as taken."""
    cuda = cuda_devices(device)
    if not cuda:
        return 0
    import torch

    return sum(torch.cuda.memory_reserved(one) - torch.cuda.memory_allocated(one) for one in cuda)


@dataclass(frozen=True)
class _CgroupFiles:
    """File names of one cgroup version; ``cache`` is the key of reclaimable page cache in memory.stat."""

    limit: str
    usage: str
    cache: str


_CGROUP_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_CGROUP_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def _cgroup_free_bytes(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The least that any cgroup above this process still grants; None without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    free: list[int] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            free += _free_along(root, path, _CGROUP_V2)
        elif "memory" in controllers.split(","):
            free += _free_along(root / "memory", path, _CGROUP_V1)
    return min(free, default=None)


def _free_along(root: Path, path: str, files: _CgroupFiles) -> Iterator[int]:
    """Free bytes of the group and of every group above it: the tightest limit is the one that holds."""
    group = root / path.lstrip("/")
    # In a container the path may be the host's: then only the root can be read.
    for folder in (group, *group.parents):
        free = _group_free(folder, files)
        if free is not None:
            yield free
        if folder == root:
            return


def _group_free(folder: Path, files: _CgroupFiles) -> int | None:
    try:
        limit = (folder / files.limit).read_text().strip()
        usage = int((folder / files.usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if not limit.isdigit():  # "max"
        return None
    cache = next((int(line.split()[1]) for line in stat.splitlines() if line.split()[:1] == [files.cache]), 0)
    return max(0, int(limit) - usage + cache)
