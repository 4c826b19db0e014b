"""One meter a request: its peaks, its components, and what they leave unexplained. Every number is in bytes."""

from __future__ import annotations

import threading
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tidekv_llm.memory import probes

COMPONENTS = (
    "weights",
    "ready_layer",
    "active_kv",
    "bridge",
    "activations",
    "temporary",
    "compressed_cache",
    "document_store",
)

ProcessMethod = Literal["vmhwm", "sampled"]


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
    devices: dict[str, probes.CudaPeaks] = field(default_factory=dict)

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
        self._sampler: probes.Sampler | None = None
        self._cuda: tuple[str, ...] = ()
        self._before = 0
        self._state: Literal["new", "open", "closed"] = "new"
        self._final: MemoryReport | None = None
        self._shared = False
        self.set_component("weights", weights)

    def __enter__(self) -> MemoryMeter:
        if self._state != "new":
            raise RuntimeError("a MemoryMeter serves one request; make a new one")
        self._cuda = probes.cuda_devices(self._device)
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
            self._sampler = probes.Sampler()
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
        probes.return_free_heap()
        return probes.reset_vmhwm()

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
        devices = {device: probes.read_cuda(device) for device in self._cuda}
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
                "nvml": probes.nvml_process_bytes(self._cuda) if self._cuda else None,
            },
            components=self._all_components(peak),
            process_method="vmhwm" if self._sampler is None else "sampled",
            shared=self._shared,
            devices=devices,
        )

    def _now_bytes(self) -> int:
        if not self._cuda:
            return probes.resident_bytes()
        return sum(probes.read_cuda(device).allocated_now for device in self._cuda)

    def _process_peak(self) -> int:
        if self._sampler is not None:
            return self._sampler.look()
        status = probes.status_bytes("VmHWM")
        return status[0] if status is not None else probes.resident_bytes()

    def _steady_bytes(self, devices: dict[str, probes.CudaPeaks]) -> int:
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
