"""The memory accountant: what a request held, and the highest it went while the cache was built.

The paper (sections 3.2 and 5) splits the working set of cache construction into components and keeps
three peaks apart: what the allocator handed out, what it reserved, and what the process took.

    with MemoryMeter("cpu", weights=weight_bytes(model)) as meter:
        ...                                      # build the compressed cache
        meter.set_component("bridge", bridge.nbytes)
        report = meter.report()                  # now, while the cache is all that is left
    report.transient_bytes                       # peak minus the steady state after it

One meter serves one request. Every number is in bytes, and torch is imported only where it is needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

COMPONENTS = (
    "weights",
    "active_kv",
    "bridge",
    "activations",
    "temporary",
    "compressed_cache",
    "document_store",
)

ProcessMethod = Literal["vmhwm", "sampled"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.005
# A reset that leaves the old peak this far above the resident size did not happen.
_RESET_SLACK_BYTES = 16 << 20


# --- weights ------------------------------------------------------------------------------------


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the distinct storages behind a model's parameters and buffers; tied weights count once."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in _plain_tensors(model):
        storage = tensor.untyped_storage()
        # Meta storages all sit at address 0; their own identity tells them apart.
        address = storage.data_ptr() or storage._cdata
        sizes[str(tensor.device), address] = storage.nbytes()
    return sum(sizes.values())


def _plain_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    # remove_duplicate=False costs nothing: storages are compared later anyway.
    for tensor in (*model.parameters(), *model.buffers()):
        yield from _flatten(tensor)


def _flatten(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors inside a tensor; quantised ones are wrappers around several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _flatten(getattr(tensor, name))


# --- the process peak ---------------------------------------------------------------------------


def _status_bytes(*names: str) -> list[int] | None:
    """Fields of /proc/self/status that are counted in kB, in bytes; None if one is missing."""
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        return [int(fields[name].split()[0]) * 1024 for name in names]
    except (KeyError, IndexError, ValueError):
        return None


def _reset_vmhwm() -> bool:
    """Set the kernel's high-water mark back to the resident size; False where that is not possible."""
    before = _status_bytes("VmHWM")
    if before is None:
        return False
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    after = _status_bytes("VmHWM", "VmRSS")
    if after is None:
        return False
    high, resident = after
    # Some sandboxes accept the write and ignore it.
    return not (high >= before[0] and high > resident + _RESET_SLACK_BYTES)


def _return_free_heap() -> None:
    """Let glibc's malloc give back what earlier requests freed; elsewhere nothing.

    Pages that malloc keeps are resident already, so a request that reuses them would seem to need nothing:
    the second of two equal requests showed a transient of 0 instead of 16 MiB. Takes a few milliseconds
    after a request, microseconds when there is nothing to give back.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no CDLL(None)
        return None


def _resident_bytes() -> int:
    """Resident set size of this process."""
    status = _status_bytes("VmRSS")
    if status is not None:
        return status[0]
    import psutil

    return int(psutil.Process().memory_info().rss)


class _Sampler:
    """Highest resident size seen by a thread that looks every few milliseconds.

    A peak shorter than the interval can be missed: the report says that it was sampled.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.peak_bytes = _resident_bytes()
        self._thread = threading.Thread(target=self._run, name="tidekv-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.look()

    def look(self) -> int:
        """Take one sample now; returns the peak so far."""
        self.peak_bytes = max(self.peak_bytes, _resident_bytes())
        return self.peak_bytes

    def stop(self) -> None:
        self._stop.set()


# --- CUDA ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaPeaks:
    """One CUDA device: peaks since the meter began, and what is allocated now, in bytes."""

    allocated: int
    reserved: int
    allocated_now: int


def _cuda_devices(device: object) -> tuple[str, ...]:
    """The CUDA devices among one device or several, as ``cuda:N``; empty on a CPU."""
    several = device if isinstance(device, Sequence) and not isinstance(device, str) else (device,)
    names = dict.fromkeys(str(one) for one in several)
    return tuple(_with_index(name) for name in names if name.split(":")[0] == "cuda")


def _with_index(name: str) -> str:
    if ":" in name:
        return name
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def _read_cuda(device: str) -> CudaPeaks:
    import torch

    return CudaPeaks(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=torch.cuda.max_memory_reserved(device),
        allocated_now=torch.cuda.memory_allocated(device),
    )


@functools.cache
def _nvml() -> Any:
    """The NVML module, started once for the life of the process; None where there is none."""
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except Exception:  # no module, no driver, no library: NVML has an error class of its own for each
        return None
    return module


def _nvml_process_bytes(devices: Sequence[str]) -> int | None:
    """GPU memory the driver charges to this process now, or None if NVML cannot say.

    It includes the CUDA context and kernels, which torch's own counters do not. It is a reading, not a
    peak, but torch keeps what it reserved, so after the work it is as high as it was. Inside a container
    with its own process ids the driver lists ids from outside, so ours may not be found.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    import torch

    used: list[int] = []
    try:
        for device in devices:
            # The UUID survives CUDA_VISIBLE_DEVICES, which renumbers torch's devices but not NVML's.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    used.append(int(process.usedGpuMemory))
    except Exception:
        return None
    return sum(used) if used else None


# --- the meter ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryReport:
    """What one request needed; every number is in bytes.

    Attributes:
        construction_peak_bytes: highest memory since the meter began: allocated on CUDA (all of the
            meter's devices together), the process on a CPU.
        before_bytes: the same quantity when the meter began; loaded weights are in it.
        transient_bytes: construction peak minus the steady state after it.
        peaks: ``process``, ``allocated``, ``reserved`` and ``nvml``; None where it cannot be known.
        components: one number per name in :data:`COMPONENTS`, each the highest that was reported.
            ``activations``, unless reported, is what the growth of the peak leaves unexplained:
            a lower bound, since the components do not all peak at once.
        process_method: how the process peak was found, ``vmhwm`` (exact) or ``sampled``.
        shared: another meter ran at the same time, so the peaks hold its memory too.
    """

    construction_peak_bytes: int
    before_bytes: int
    transient_bytes: int
    peaks: dict[str, int | None]
    components: dict[str, int]
    process_method: ProcessMethod
    shared: bool = False
    devices: dict[str, CudaPeaks] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain types that JSON can take."""
        return asdict(self)


_lock = threading.Lock()
# Weak, so that a generator dropped half way does not mark all later requests as shared.
_active: weakref.WeakSet[MemoryMeter] = weakref.WeakSet()


class MemoryMeter:
    """Peaks and components of one request.

    The kernel's high-water mark and the CUDA peaks belong to the whole process. They are reset when a
    meter begins and no other one is active, and malloc gives back its free pages; so neither the peak of
    an earlier request, failed or not, nor the heap that it left behind is in the numbers. When two meters
    overlap the later one does not reset, each sees the memory of both (the later one also what the
    earlier one did before it), and both reports say ``shared=True``.

    Args:
        device: where the request runs: a name, a ``torch.device``, or a sequence of them.
        weights: bytes of the model's weights, from :func:`weight_bytes`; loaded before the meter begins.
    """

    def __init__(self, device: object = "cpu", *, weights: int = 0) -> None:
        self._device = device
        self._components: dict[str, int] = {}
        self._sampler: _Sampler | None = None
        self._cuda: tuple[str, ...] = ()
        self._before = 0
        self._state: Literal["new", "open", "closed"] = "new"
        self._final: MemoryReport | None = None
        self._shared = False
        self.set_component("weights", weights)

    def __enter__(self) -> MemoryMeter:
        if self._state != "new":
            raise RuntimeError("a MemoryMeter serves one request; make a new one")
        self._cuda = _cuda_devices(self._device)
        with _lock:
            self._begin()
        self._state = "open"
        return self

    def _begin(self) -> None:
        others = list(_active)
        self._shared = bool(others)
        for other in others:
            other._shared = True
        exact = self._join(others[0]) if others else self._reset()
        if not exact:
            self._sampler = _Sampler()
            weakref.finalize(self, self._sampler.stop)
        self._before = self._now_bytes()
        _active.add(self)

    def _join(self, other: MemoryMeter) -> bool:
        """Use the high-water mark that another meter has reset; False if it had to sample."""
        return other._sampler is None

    def _reset(self) -> bool:
        if self._cuda:
            import torch

            for device in self._cuda:
                torch.cuda.reset_peak_memory_stats(device)
        _return_free_heap()
        return _reset_vmhwm()

    def __exit__(self, *exception: object) -> None:
        try:
            self._final = self._measure()
        except Exception:
            # A broken CUDA context cannot be measured, and must not hide the error that broke it.
            if exception[0] is None:
                raise
        finally:
            # Whatever happened, later requests must not count as shared.
            with _lock:
                _active.discard(self)
            if self._sampler is not None:
                self._sampler.stop()
            self._state = "closed"

    def set_component(self, name: str, nbytes: int) -> None:
        """Report the size of a component; the highest one is kept.

        Raises:
            ValueError: no such component, or a negative size.
        """
        if name not in COMPONENTS:
            raise ValueError(f"unknown memory component {name!r}; the names are {', '.join(COMPONENTS)}")
        if nbytes < 0:
            raise ValueError(f"{name}={nbytes} bytes cannot be negative")
        self._components[name] = max(nbytes, self._components.get(name, 0))

    def report(self) -> MemoryReport:
        """The numbers as they stand; after the ``with`` block, as they stood at its end.

        Raises:
            RuntimeError: the meter has not begun.
        """
        if self._final is not None:
            return self._final
        if self._state == "new":
            raise RuntimeError("the MemoryMeter has not begun; use it in a with statement")
        return self._measure()

    def _measure(self) -> MemoryReport:
        devices = {device: _read_cuda(device) for device in self._cuda}
        process = self._process_peak()
        allocated = sum(one.allocated for one in devices.values()) if devices else None
        reserved = sum(one.reserved for one in devices.values()) if devices else None
        peak = process if allocated is None else allocated
        return MemoryReport(
            construction_peak_bytes=peak,
            before_bytes=self._before,
            transient_bytes=max(0, peak - self._steady_bytes(devices)),
            peaks={
                "process": process,
                "allocated": allocated,
                "reserved": reserved,
                "nvml": _nvml_process_bytes(self._cuda) if self._cuda else None,
            },
            components=self._all_components(peak),
            process_method="vmhwm" if self._sampler is None else "sampled",
            shared=self._shared,
            devices=devices,
        )

    def _now_bytes(self) -> int:
        if not self._cuda:
            return _resident_bytes()
        return sum(_read_cuda(device).allocated_now for device in self._cuda)

    def _process_peak(self) -> int:
        if self._sampler is not None:
            return self._sampler.look()
        status = _status_bytes("VmHWM")
        return status[0] if status is not None else _resident_bytes()

    def _steady_bytes(self, devices: dict[str, CudaPeaks]) -> int:
        if devices:
            return sum(one.allocated_now for one in devices.values())
        # malloc may keep freed pages, so the resident size after the work is not what is needed then.
        return self._before + sum(self._components.get(name, 0) for name in ("compressed_cache", "document_store"))

    def _all_components(self, peak: int) -> dict[str, int]:
        known = {name: self._components.get(name, 0) for name in COMPONENTS}
        if "activations" not in self._components:
            # The weights are in before_bytes already, as are the interpreter and its libraries.
            explained = sum(known.values()) - known["weights"]
            known["activations"] = max(0, peak - self._before - explained)
        return known


# --- what is free -------------------------------------------------------------------------------


def available_bytes(device: object = "cpu") -> int:
    """Bytes that can still be taken on a device: free CUDA memory, or RAM within the cgroup's limit."""
    cuda = _cuda_devices(device)
    if cuda:
        import torch

        return sum(torch.cuda.mem_get_info(one)[0] for one in cuda)
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _cgroup_free_bytes()
    return free if limit is None else min(free, limit)


def reusable_bytes(device: object = "cpu") -> int:
    """What torch's CUDA allocator has reserved but does not use: free for us, though the driver counts it as taken."""
    cuda = _cuda_devices(device)
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


def format_bytes(nbytes: int) -> str:
    """A size for people: ``format_bytes(1_610_612_736) == "1.50 GiB"``."""
    size = float(abs(nbytes))
    sign = "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.999 would print as "1024.00": move on to the next unit a little earlier.
        if size < 1023.995:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} TiB"
