"""What the system says about memory: the process, its high-water mark and its heap, CUDA's allocator, NVML.

Every number is in bytes, and torch is imported only where it is needed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_SAMPLE_SECONDS = 0.005
# A reset that leaves the old peak this far above the resident size did not happen.
_RESET_SLACK_BYTES = 16 << 20


# --- the process ---


def status_bytes(*names: str) -> list[int] | None:
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


def reset_vmhwm() -> bool:
    """Set the kernel's high-water mark back to the resident size; False where that is not possible."""
    before = status_bytes("VmHWM")
    if before is None:
        return False
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    after = status_bytes("VmHWM", "VmRSS")
    if after is None:
        return False
    high, resident = after
    # Some sandboxes accept the write and ignore it.
    return not (high >= before[0] and high > resident + _RESET_SLACK_BYTES)


def return_free_heap() -> None:
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


def resident_bytes() -> int:
    """Resident set size of this process."""
    status = status_bytes("VmRSS")
    if status is not None:
        return status[0]
    import psutil

    return int(psutil.Process().memory_info().rss)


class Sampler:
    """Highest resident size seen by a thread that looks every few milliseconds.

    A peak shorter than the interval can be missed: the report says that it was sampled.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.peak_bytes = resident_bytes()
        self._thread = threading.Thread(target=self._run, name="tidekv-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self.look()

    def look(self) -> int:
        """Take one sample now; returns the peak so far."""
        self.peak_bytes = max(self.peak_bytes, resident_bytes())
        return self.peak_bytes

    def stop(self) -> None:
        self._stop.set()


# --- CUDA and NVML ---


@dataclass(frozen=True)
class CudaPeaks:
    """One CUDA device: peaks since the meter began, and what is allocated now, in bytes."""

    allocated: int
    reserved: int
    allocated_now: int


def cuda_devices(device: object) -> tuple[str, ...]:
    """The CUDA devices among one device or several, as ``cuda:N``; empty on a CPU."""
    several = device if isinstance(device, Sequence) and not isinstance(device, str) else (device,)
    names = dict.fromkeys(str(one) for one in several)
    return tuple(_with_index(name) for name in names if name.split(":")[0] == "cuda")


def _with_index(name: str) -> str:
    if ":" in name:
        return name
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def read_cuda(device: str) -> CudaPeaks:
    """What torch's allocator counts on one device."""
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


def nvml_process_bytes(devices: Sequence[str]) -> int | None:
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
