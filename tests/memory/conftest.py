"""A stand-in for torch.cuda: two devices and their counters."""

from __future__ import annotations

import pytest
import torch

from tidekv_llm.memory import probes


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
    monkeypatch.setattr(probes, "nvml_process_bytes", lambda devices: None)
    return fake
