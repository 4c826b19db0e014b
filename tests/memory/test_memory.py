"""The accountant: real allocations in, the right numbers out, nothing carried to the next request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tidekv_llm import memory
from tidekv_llm.memory import COMPONENTS, MemoryMeter, available_bytes, format_bytes, weight_bytes

MIB = 1 << 20
BIG = 200 * MIB

methods = pytest.mark.parametrize("method", ["vmhwm", "sampled"])


@pytest.fixture
def use_method(request, monkeypatch):
    """Force one way of finding the process peak; skip the exact one where the kernel forbids it."""

    def use(method: str) -> None:
        if method == "sampled":
            monkeypatch.setattr(memory, "_reset_vmhwm", lambda: False)
        elif not memory._reset_vmhwm():
            pytest.skip("this system cannot reset VmHWM")

    return use


def touch(nbytes: int) -> torch.Tensor:
    """A tensor whose pages are really resident."""
    return torch.ones(nbytes, dtype=torch.uint8)


def growth(report: memory.MemoryReport) -> int:
    return report.construction_peak_bytes - report.before_bytes


def no_meter_is_active() -> bool:
    return len(memory._active) == 0


# --- the process peak ---


@methods
def test_a_large_tensor_shows_within_five_percent(method, use_method):
    use_method(method)
    with MemoryMeter() as meter:
        tensor = touch(BIG)
        time.sleep(0.02)  # several samples
    report = meter.report()
    assert growth(report) == pytest.approx(BIG, rel=0.05)
    assert report.process_method == method
    assert report.peaks["process"] == report.construction_peak_bytes
    assert report.peaks["allocated"] is report.peaks["reserved"] is report.peaks["nvml"] is None
    del tensor


@methods
def test_a_freed_tensor_is_still_in_the_peak_but_not_in_the_next_request(method, use_method):
    use_method(method)
    with MemoryMeter() as first:
        tensor = touch(BIG)
        time.sleep(0.02)
        del tensor
    with MemoryMeter() as second:
        pass
    assert growth(first.report()) == pytest.approx(BIG, rel=0.05)
    assert growth(second.report()) < 0.05 * BIG
    assert not first.report().shared
    assert not second.report().shared


@methods
def test_a_failed_request_leaves_nothing_behind(method, use_method):
    use_method(method)

    def fail() -> None:
        tensor = touch(BIG)
        time.sleep(0.02)
        raise RuntimeError(f"failed while {tensor.nbytes} bytes were held")

    with pytest.raises(RuntimeError, match="failed while"), MemoryMeter() as failed:
        failed.set_component("bridge", BIG)
        fail()
    assert no_meter_is_active()
    with MemoryMeter() as following:
        pass
    assert growth(following.report()) < 0.05 * BIG
    assert following.report().components["bridge"] == 0
    assert not following.report().shared


def test_heap_that_an_earlier_request_left_free_does_not_hide_what_the_next_one_needs():
    def fragment() -> int:
        """Blocks too small to be mapped on their own, so that malloc keeps them once they are freed."""
        blocks = [touch(64 * 1024) for _ in range(800)]
        return sum(block.nbytes for block in blocks)

    needed = []
    for _ in range(3):
        with MemoryMeter() as meter:
            total = fragment()
        needed.append(growth(meter.report()))
    if memory._malloc_trim() is None:
        pytest.skip("this C library cannot give back its heap")
    assert min(needed) > 0.9 * total


def test_the_steady_state_is_what_was_there_before_plus_the_compressed_cache():
    with MemoryMeter() as meter:
        cache, scratch = touch(BIG), touch(BIG)
        meter.set_component("compressed_cache", cache.nbytes)
        del scratch
    report = meter.report()
    assert report.transient_bytes == pytest.approx(BIG, rel=0.05)
    assert report.transient_bytes == growth(report) - BIG


def test_transient_is_never_negative():
    with MemoryMeter() as meter:
        meter.set_component("compressed_cache", 1 << 40)
    assert meter.report().transient_bytes == 0


def test_report_inside_the_block_reads_now_and_after_it_is_final():
    with MemoryMeter() as meter:
        early = meter.report()
        tensor = touch(BIG)
        late = meter.report()
    assert growth(late) - growth(early) == pytest.approx(BIG, rel=0.05)
    final = meter.report()
    more = touch(2 * BIG)
    assert meter.report() is final
    assert tensor.nbytes < more.nbytes


# --- several at once ---


def test_a_nested_meter_does_not_reset_the_outer_peak_and_both_say_shared():
    with MemoryMeter() as outer:
        tensor = touch(BIG)
        del tensor
        with MemoryMeter() as inner:
            pass
    assert growth(outer.report()) == pytest.approx(BIG, rel=0.05)
    assert outer.report().shared
    assert inner.report().shared
    with MemoryMeter() as later:
        pass
    assert not later.report().shared
    assert growth(later.report()) < 0.05 * BIG


def test_a_meter_within_a_sampling_one_samples_too(use_method):
    use_method("sampled")
    with MemoryMeter(), MemoryMeter() as inner:
        tensor = touch(BIG)
        time.sleep(0.02)
    assert inner.report().process_method == "sampled"
    assert growth(inner.report()) == pytest.approx(tensor.nbytes, rel=0.05)


def test_two_threads_do_not_take_each_others_peak_away():
    started, freed = threading.Event(), threading.Event()
    reports = {}

    def first() -> None:
        with MemoryMeter() as meter:
            tensor = touch(BIG)
            del tensor
            started.set()
            assert freed.wait(10)
        reports["first"] = meter.report()

    def second() -> None:
        assert started.wait(10)
        with MemoryMeter() as meter:
            pass
        reports["second"] = meter.report()
        freed.set()

    threads = [threading.Thread(target=job) for job in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert growth(reports["first"]) == pytest.approx(BIG, rel=0.05)
    assert reports["first"].shared
    assert reports["second"].shared
    assert no_meter_is_active()


def test_a_meter_that_was_dropped_half_way_does_not_mark_later_requests():
    meter = MemoryMeter()
    meter.__enter__()
    del meter
    with MemoryMeter() as later:
        pass
    assert not later.report().shared


def test_many_threads_leave_no_meter_active():
    def run() -> None:
        for _ in range(20):
            with MemoryMeter() as meter:
                meter.set_component("bridge", 1)
            assert meter.report().components["bridge"] == 1

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert no_meter_is_active()


def test_sampling_threads_end_with_their_meters(use_method):
    use_method("sampled")
    for _ in range(3):
        with MemoryMeter():
            pass
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and any(t.name == "tidekv-memory" for t in threading.enumerate()):
        time.sleep(0.01)
    assert not any(t.name == "tidekv-memory" for t in threading.enumerate())


# --- where VmHWM cannot be reset ---


def test_forbidden_clear_refs_falls_back_to_sampling(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with MemoryMeter() as meter:
        pass
    assert meter.report().process_method == "sampled"


def test_an_ignored_reset_falls_back_to_sampling(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t  900000 kB\nVmRSS:\t  100000 kB\n")
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    assert not memory._reset_vmhwm()
    status.write_text("Name:\tx\nVmHWM:\t  101000 kB\nVmRSS:\t  100000 kB\n")
    assert memory._reset_vmhwm()


def test_without_proc_the_resident_size_comes_from_psutil(monkeypatch, tmp_path):
    exact = memory._resident_bytes()
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    assert memory._resident_bytes() == pytest.approx(exact, rel=0.05)
    assert not memory._reset_vmhwm()


def test_a_failing_measurement_does_not_hide_the_error_of_the_request(monkeypatch):
    def broken(self):
        raise RuntimeError("CUDA context is gone")

    monkeypatch.setattr(MemoryMeter, "_measure", broken)
    with pytest.raises(ValueError, match="the real error"), MemoryMeter():
        raise ValueError("the real error")
    with pytest.raises(RuntimeError, match="context is gone"), MemoryMeter():
        pass
    assert no_meter_is_active()


# --- components ---


def test_components_keep_their_maximum_and_are_complete():
    with MemoryMeter(weights=7) as meter:
        meter.set_component("active_kv", 5)
        meter.set_component("active_kv", 9)
        meter.set_component("active_kv", 1)
        meter.set_component("activations", 3)
    components = meter.report().components
    assert tuple(components) == COMPONENTS
    assert components["weights"] == 7
    assert components["active_kv"] == 9
    assert components["activations"] == 3
    assert components["temporary"] == 0


def test_activations_are_what_the_others_leave_unexplained():
    with MemoryMeter(weights=50 * MIB) as meter:
        tensor = touch(BIG)
        meter.set_component("active_kv", BIG // 2)
    report = meter.report()
    assert report.components["activations"] == growth(report) - BIG // 2
    assert tensor.nbytes == BIG


def test_the_remainder_is_never_negative():
    with MemoryMeter() as meter:
        meter.set_component("bridge", 1 << 40)
    assert meter.report().components["activations"] == 0


@pytest.mark.parametrize(("name", "nbytes"), [("kv", 1), ("", 1), ("bridge", -1)])
def test_unknown_components_and_negative_sizes_are_refused(name, nbytes):
    with pytest.raises(ValueError, match=r"the names are weights|cannot be negative"):
        MemoryMeter().set_component(name, nbytes)


def test_a_meter_serves_one_request():
    meter = MemoryMeter()
    with pytest.raises(RuntimeError, match="has not begun"):
        meter.report()
    with meter, pytest.raises(RuntimeError, match="one request"):
        meter.__enter__()
    with pytest.raises(RuntimeError, match="one request"):
        meter.__enter__()


def test_the_report_is_json():
    with MemoryMeter() as meter:
        pass
    assert json.loads(json.dumps(meter.report().as_dict()))["process_method"] in {"vmhwm", "sampled"}


def test_a_meter_costs_less_than_a_millisecond():
    # In a process of its own: trimming the heap that the tests before left behind is no cost of the meter.
    code = """
import time
import torch
from tidekv_llm.memory import MemoryMeter

def once():
    start = time.perf_counter()
    with MemoryMeter(weights=1) as meter:
        meter.set_component("bridge", 1)
    meter.report()
    return time.perf_counter() - start

# The best of many: the machine may be busy, the code is not.
print(min(once() for _ in range(50)))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout) < 1e-3


# --- CUDA, through a stand-in ---


class FakeCuda:
    """torch.cuda's counters for two devices; peaks are reset as torch resets them."""

    def __init__(self) -> None:
        self.now = {"cuda:0": 100, "cuda:1": 10}
        self.peak = {"cuda:0": 900, "cuda:1": 90}

    def reset_peak_memory_stats(self, device):
        self.peak[device] = self.now[device]

    def max_memory_allocated(self, device):
        return self.peak[device]

    def max_memory_reserved(self, device):
        return 2 * self.peak[device]

    def memory_allocated(self, device):
        return self.now[device]

    def current_device(self):
        return 0

    def mem_get_info(self, device):
        return (1000 if device == "cuda:0" else 50, 2000)

    def allocate(self, device, nbytes):
        self.now[device] += nbytes
        self.peak[device] = max(self.peak[device], self.now[device])


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(memory, "_nvml_process_bytes", lambda devices: None)
    return fake


def test_cuda_peaks_are_reset_and_the_transient_is_over_the_allocation_after(cuda):
    with MemoryMeter(torch.device("cuda", 0), weights=100) as meter:
        cuda.allocate("cuda:0", 500)
        cuda.allocate("cuda:0", -450)
        meter.set_component("compressed_cache", 50)
    report = meter.report()
    assert report.before_bytes == 100
    assert report.construction_peak_bytes == report.peaks["allocated"] == 600
    assert report.peaks["reserved"] == 1200
    assert report.transient_bytes == 450
    assert report.components["activations"] == 450
    assert list(report.devices) == ["cuda:0"]


def test_several_devices_are_summed_and_listed(cuda):
    with MemoryMeter(["cuda:0", "cuda:1", "cpu"]) as meter:
        cuda.allocate("cuda:1", 5)
    report = meter.report()
    assert report.before_bytes == 110
    assert report.construction_peak_bytes == 115
    assert report.devices["cuda:1"].allocated == 15


def test_a_nested_meter_does_not_reset_the_cuda_peak(cuda):
    with MemoryMeter("cuda:0") as outer:
        cuda.allocate("cuda:0", 500)
        cuda.allocate("cuda:0", -500)
        with MemoryMeter("cuda:0"):
            pass
    assert outer.report().peaks["allocated"] == 600


def test_cuda_without_an_index_is_the_current_device(cuda):
    with MemoryMeter("cuda") as meter:
        pass
    assert list(meter.report().devices) == ["cuda:0"]


def test_available_cuda_memory(cuda):
    assert available_bytes("cuda:0") == 1000
    assert available_bytes(["cuda:0", "cuda:1"]) == 1050


# --- NVML, through a stand-in ---


class FakeNvml:
    """One device, known by its UUID, with our process on it and another one."""

    def __init__(self, pid: int) -> None:
        self.processes = [
            SimpleNamespace(pid=pid, usedGpuMemory=700),
            SimpleNamespace(pid=1, usedGpuMemory=5),
        ]
        self.starts = 0

    def nvmlInit(self):
        self.starts += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1234":
            raise LookupError(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return self.processes


@pytest.fixture
def nvml(monkeypatch):
    memory._nvml.cache_clear()
    fake = FakeNvml(os.getpid())
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    uuids = {"cuda:0": "1234", "cuda:1": "unknown"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    yield fake
    memory._nvml.cache_clear()


def test_nvml_counts_this_process_and_starts_once(nvml):
    assert memory._nvml_process_bytes(["cuda:0"]) == 700
    assert memory._nvml_process_bytes(["cuda:0"]) == 700
    assert nvml.starts == 1


def test_nvml_that_does_not_know_says_nothing(nvml):
    assert memory._nvml_process_bytes(["cuda:1"]) is None
    nvml.processes.pop(0)
    assert memory._nvml_process_bytes(["cuda:0"]) is None


def test_nvml_that_is_missing_says_nothing(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert memory._nvml_process_bytes(["cuda:0"]) is None


# --- weights ---


def test_tied_weights_count_once():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    assert weight_bytes(model) == 2 * 160
    model[1].weight = model[0].weight
    assert weight_bytes(model) == 160


def test_views_of_one_storage_count_once_and_buffers_count():
    storage = torch.zeros(100)
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(storage[:40])
    model.b = torch.nn.Parameter(storage[40:])
    model.register_buffer("c", torch.zeros(8, dtype=torch.int64))
    assert weight_bytes(model) == 400 + 64


def test_meta_weights_are_told_apart():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    assert weight_bytes(model) == 128


def test_a_model_without_weights_has_none():
    assert weight_bytes(torch.nn.Identity()) == 0


# --- what is free ---


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
    return memory._cgroup_free_bytes(tmp_path / "cgroup", tmp_path / "fs")


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
    assert memory._cgroup_free_bytes(tmp_path / "missing", tmp_path) is None


# --- small things ---


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (75 * MIB, "75.00 MiB"),
        (1_610_612_736, "1.50 GiB"),
        (MIB - 1, "1.00 MiB"),
        (1 << 40, "1.00 TiB"),
        (5 << 50, "5120.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


def test_importing_the_accountant_does_not_import_torch():
    # Run by path: what the package's own __init__ imports is not the question here.
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, memory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
