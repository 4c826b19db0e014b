"""What the CPU is taken for: its own kind, or less, on every system; and that torch then computes so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from tidekv_llm import hardware
from tidekv_llm.cli import main
from tidekv_llm.cli.doctor import doctor
from tidekv_llm.errors import ConfigError

ROOT = Path(__file__).parents[1]
AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
FLAGS = {
    "baseline": ("sse4_2",),
    "avx2": ("avx2", "fma3"),
    "avx512": ("avx2", "fma3", *AVX512),
    "avx512_bf16": ("avx2", "fma3", *AVX512, "avx512_bf16"),
    "amx": ("avx2", "fma3", *AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "arm_bf16": ("neon", "bf16"),
}


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (hardware.VARIABLE, *hardware._LIBRARIES):
        monkeypatch.delenv(variable, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A CPU of this kind, as torch would describe it."""
    machine = "aarch64" if kind.startswith("arm") else "x86_64"
    monkeypatch.setattr("platform.machine", lambda: machine)
    flags = MappingProxyType(dict.fromkeys(FLAGS[kind], True) | {"amx_fp16": False, "l2_cache_size": 1})
    monkeypatch.setattr(hardware, "_capabilities", lambda: flags)


@pytest.mark.parametrize("kind", FLAGS)
def test_a_cpu_is_what_its_instructions_say(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind)
    assert hardware.cpu_kind() == kind
    assert hardware.limited_by() is None
    native = kind in ("avx512_bf16", "amx", "arm_bf16")
    assert hardware.default_dtype(torch.device("cpu")) == (torch.bfloat16 if native else torch.float32)


@pytest.mark.parametrize("kind", FLAGS)
def test_before_torch_can_tell_linux_does(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, kind)
    monkeypatch.setattr(hardware, "_capabilities", dict)
    names = " ".join(name.replace("avx512_", "avx512").replace("fma3", "fma") for name in FLAGS[kind])
    names = names.replace("avx512bf16", "avx512_bf16")  # the kernel's own spelling
    listing = tmp_path / "cpuinfo"
    listing.write_text(f"processor\t: 0\nmodel name\t: Some avx2 CPU\nflags\t\t: fpu {names} lm\n")
    found = hardware._flags_of_linux(listing)
    monkeypatch.setattr(hardware, "_flags_of_linux", lambda: found)
    assert hardware.cpu_kind() == kind


def test_a_cpu_nobody_can_ask_is_a_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_capabilities", dict)
    nothing = hardware._flags_of_linux(tmp_path / "no" / "cpuinfo")
    monkeypatch.setattr(hardware, "_flags_of_linux", lambda: nothing)
    assert hardware.cpu_kinds() == ["baseline"]
    assert hardware.default_dtype(torch.device("cpu")) == torch.float32
    assert hardware.cpu_name()


def test_arm_without_onednn_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "arm_bf16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert hardware.cpu_kind() == "baseline"


@pytest.mark.parametrize("kind", FLAGS)
def test_tiles_are_for_numbers_that_the_cpu_multiplies_natively(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind)
    assert hardware.prefers_tiles(2) == (kind in ("avx512_bf16", "amx", "arm_bf16"))
    assert not hardware.prefers_tiles(4)


@pytest.mark.parametrize("limit", ["baseline", "avx2", "avx512", "avx512_bf16", "amx", " AVX2 "])
def test_the_variable_holds_a_cpu_back(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "amx")
    monkeypatch.setenv("TIDEKV_CPU", limit)
    assert hardware.cpu_kind() == limit.strip().lower()
    line = next(check.value for check in doctor() if check.item == "CPU")
    assert ("(amx, held back by TIDEKV_CPU=" in line) == (limit != "amx")


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512"),
        ("ONEDNN_MAX_CPU_ISA", "avx2_vnni", "avx2"),
        ("ONEDNN_MAX_CPU_ISA", "ALL", "amx"),
        ("ATEN_CPU_CAPABILITY", "default", "baseline"),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2", "avx2"),
    ],
)
def test_what_holds_a_library_back_counts(
    variable: str, value: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "amx")
    monkeypatch.setenv(variable, value)
    assert hardware.cpu_kind() == kind
    assert hardware.limited_by() == (variable if kind != "amx" else None)


@pytest.mark.parametrize(("kind", "value"), [("avx2", "amx"), ("avx512", "avx512_bf16"), ("avx2", "arm_bf16")])
def test_more_than_the_cpu_has_is_refused(kind: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, kind)
    monkeypatch.setenv("TIDEKV_CPU", value)
    with pytest.raises(ConfigError, match=f"TIDEKV_CPU='{value}' is more than this CPU has; use .*{kind}, or unset it"):
        hardware.default_dtype(torch.device("cpu"))


def test_no_kind_is_one_line_that_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEKV_CPU", "pentium")
    assert main(["doctor"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert all(kind in told for kind in ("'pentium'", "avx2", "avx512", "avx512_bf16", "amx"))


@pytest.mark.parametrize("count", [None, 1])
def test_there_is_at_least_one_core(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: count)
    assert hardware.cores() == 1


PROGRAM = """
import json
from tidekv_llm import hardware
hardware.limit_libraries()
import torch
used = hardware.processor(torch.device("cpu"))
print(json.dumps([torch.backends.cpu.get_cpu_capability(), str(hardware.default_dtype(torch.device("cpu"))), used]))
"""


def test_torch_computes_as_the_variable_says_and_stores_are_told_apart() -> None:
    """Each kind in a process of its own: the libraries look once."""
    kinds = hardware.cpu_kinds()
    found = {}
    for kind in kinds:
        clean = {name: value for name, value in os.environ.items() if name not in hardware._LIBRARIES}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=clean | {"TIDEKV_CPU": kind},
            capture_output=True,
            text=True,
            check=True,
        )
        capability, dtype, used = json.loads(done.stdout)
        assert capability == {"baseline": "DEFAULT", "avx2": "AVX2"}.get(kind, capability)
        assert (dtype == "torch.bfloat16") == (kind in hardware._NATIVE_BF16)
        found[kind] = used
    assert len(set(found.values())) == len(kinds)
