"""The accountant: real allocations in, the right numbers out, nothing carried to the next request."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

from tidekv_llm.memory import COMPONENTS, MemoryMeter, MemoryReport, probes
from tidekv_llm.memory import meter as meters

MIB = 1 << 20
BIG = 200 * MIB

methods = pytest.mark.parametrize("method", ["vmhwm", "sampled"])


@pytest.fixture
def use_method(request, monkeypatch):
    """Force one way of finding the process peak; skip the exact one where the kernel forbids it."""

    def use(method: str) -> None:
        if method == "sampled":
            monkeypatch.setattr(probes, "reset_vmhwm", lambda: False)
        elif not probes.reset_vmhwm():
            pytest.skip("this system cannot reset VmHWM")

    return use


def touch(nbytes: int) -> torch.Tensor:
    """A tensor whose pages are really resident."""
    return torch.ones(nbytes, dtype=torch.uint8)


def growth(report: MemoryReport) -> int:
    return report.construction_peak_bytes - report.before_bytes


def until_sampled(meter: MemoryMeter) -> None:
    """Until a sampling thread has seen the large tensor, however busy the machine is; at once if there is none."""
    while meter._sampler is not None and meter._sampler.peak_bytes - meter._before < 0.95 * BIG:
        time.sleep(0.001)


def no_meter_is_active() -> bool:
    return len(meters._active) == 0


# --- the process peak ---


@methods
def test_a_large_tensor_shows_within_five_percent(method, use_method):
    use_method(method)
    with MemoryMeter() as meter:
        tensor = touch(BIG)
        until_sampled(meter)
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
        until_sampled(first)
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
        until_sampled(failed)
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
    if probes._malloc_trim() is None:
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
        until_sampled(inner)
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
            assert freed.wait(300)
        reports["first"] = meter.report()

    def second() -> None:
        assert started.wait(300)
        with MemoryMeter() as meter:
            pass
        reports["second"] = meter.report()
        freed.set()

    threads = [threading.Thread(target=job) for job in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
        thread.join()
    assert no_meter_is_active()


def test_sampling_threads_end_with_their_meters(use_method):
    use_method("sampled")
    for _ in range(3):
        with MemoryMeter():
            pass
    while any(thread.name == "tidekv-memory" for thread in threading.enumerate()):
        time.sleep(0.01)  # one that stays is a hang, and ends at the test's limit


# --- where VmHWM cannot be reset ---


def test_forbidden_clear_refs_falls_back_to_sampling(monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with MemoryMeter() as meter:
        pass
    assert meter.report().process_method == "sampled"


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


def test_a_meter_looks_at_the_system_a_few_times_however_much_it_is_told(monkeypatch):
    looks = []
    for name in ("status_bytes", "reset_vmhwm", "return_free_heap", "resident_bytes"):
        real = getattr(probes, name)
        monkeypatch.setattr(
            probes, name, lambda *given, _name=name, _real=real: (looks.append(_name), _real(*given))[1]
        )
    with MemoryMeter(weights=1) as meter:
        begun = len(looks)
        for number in range(1000):
            meter.set_component("bridge", number)
        assert len(looks) == begun, "a component is only written down"
    meter.report()
    assert looks.count("reset_vmhwm") == looks.count("return_free_heap") == 1
    assert len(looks) <= 8


# --- CUDA, through a stand-in ---


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
