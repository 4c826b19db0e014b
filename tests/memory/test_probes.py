"""What the system says about memory, and what happens where it says nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tidekv_llm.memory import probes

# --- the process ---


def test_an_ignored_reset_falls_back_to_sampling(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t  900000 kB\nVmRSS:\t  100000 kB\n")
    monkeypatch.setattr(probes, "_STATUS", status)
    monkeypatch.setattr(probes, "_CLEAR_REFS", tmp_path / "clear_refs")
    assert not probes.reset_vmhwm()
    status.write_text("Name:\tx\nVmHWM:\t  101000 kB\nVmRSS:\t  100000 kB\n")
    assert probes.reset_vmhwm()


def test_without_proc_the_resident_size_comes_from_psutil(monkeypatch, tmp_path):
    exact = probes.resident_bytes()
    monkeypatch.setattr(probes, "_STATUS", tmp_path / "missing")
    assert probes.resident_bytes() == pytest.approx(exact, rel=0.05)
    assert not probes.reset_vmhwm()


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
    probes._nvml.cache_clear()
    fake = FakeNvml(os.getpid())
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    uuids = {"cuda:0": "1234", "cuda:1": "unknown"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    yield fake
    probes._nvml.cache_clear()


def test_nvml_counts_this_process_and_starts_once(nvml):
    assert probes.nvml_process_bytes(["cuda:0"]) == 700
    assert probes.nvml_process_bytes(["cuda:0"]) == 700
    assert nvml.starts == 1


def test_nvml_that_does_not_know_says_nothing(nvml):
    assert probes.nvml_process_bytes(["cuda:1"]) is None
    nvml.processes.pop(0)
    assert probes.nvml_process_bytes(["cuda:0"]) is None


def test_nvml_that_is_missing_says_nothing(nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert probes.nvml_process_bytes(["cuda:0"]) is None


def test_importing_the_accountant_does_not_import_torch():
    code = "import sys, tidekv_llm.memory; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
