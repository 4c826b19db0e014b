"""What the processor and the GPU can do: the one place that asks them, and the variable that overrules the answer.

CPUs come in kinds, each able to do what the kinds before it can:

    x86   baseline < avx2 < avx512 < avx512_bf16 < amx
    Arm   baseline < arm_bf16

``TIDEKV_CPU`` names the highest kind that may be used, so that a test or a bug report from a smaller machine can be
repeated on a larger one. It cannot name more than the CPU has: instructions cannot be had by asking for them.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidekv_llm.errors import ConfigError

if TYPE_CHECKING:
    import torch

VARIABLE = "TIDEKV_CPU"

# kind -> what the CPU must be able to do, by torch's names. A CPU nobody can ask is a baseline: that is always right.
_X86 = {
    "baseline": set[str](),
    "avx2": {"avx2", "fma3"},
    "avx512": {"avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}
_ARM = {"baseline": set[str](), "arm_bf16": {"bf16"}}
_NATIVE_BF16 = ("avx512_bf16", "amx", "arm_bf16")

# The variables with which the libraries below torch are held back, and for each kind the settings that mean it; the
# first of them is the one we use. Settings that are not here hold nothing back that matters to us.
_LIBRARIES: dict[str, dict[str, tuple[str, ...]]] = {
    "ATEN_CPU_CAPABILITY": {"baseline": ("default",), "avx2": ("avx2",)},
    "MKL_ENABLE_INSTRUCTIONS": {"baseline": ("SSE4_2", "AVX"), "avx2": ("AVX2", "AVX2_E1")},
    "ONEDNN_MAX_CPU_ISA": {
        "baseline": ("SSE41", "AVX"),
        "avx2": ("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
        "avx512": ("AVX512_CORE", "AVX512_CORE_VNNI"),
        "avx512_bf16": ("AVX512_CORE_BF16", "AVX512_CORE_FP16"),
    },
}


# -- the CPU --------------------------------------------------------------------------------------------------


def cpu_kinds() -> list[str]:
    """The kinds this CPU can work as, lowest first; the last one is its own."""
    ladder, flags = _ladder(), _cpu_flags()
    kinds: list[str] = []
    for kind, needed in ladder.items():
        if not needed <= flags:
            break
        kinds.append(kind)
    return kinds


def cpu_kind() -> str:
    """The kind this CPU works as: its own, or less where ``TIDEKV_CPU`` or a library's own variable says so.

    Raises:
        ConfigError: ``TIDEKV_CPU`` names no kind, or more than the CPU has.
    """
    kinds, limit = cpu_kinds(), cpu_limit()
    if limit is not None and limit not in kinds:
        raise ConfigError(f"{VARIABLE}={limit!r} is more than this CPU has; use {' or '.join(kinds)}, or unset it")
    limits = {limit, *(_library_limit(variable) for variable in _LIBRARIES)}
    return next((kind for kind in kinds if kind in limits), kinds[-1])


def cpu_limit() -> str | None:
    """What ``TIDEKV_CPU`` says, None if nothing; torch is not imported.

    Raises:
        ConfigError: it names no kind.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    allowed = list(dict.fromkeys([*_X86, *_ARM]))
    if value and value not in allowed:
        raise ConfigError(f"{VARIABLE}={value!r} is no kind of CPU; use one of {', '.join(allowed)}, or unset it")
    return value or None


def limited_by() -> str | None:
    """The first variable that holds the CPU back, None if it works as its own kind."""
    if cpu_kind() == cpu_kinds()[-1]:
        return None
    return VARIABLE if cpu_limit() else next(name for name in _LIBRARIES if _library_limit(name))


def limit_libraries() -> None:
    """Let torch's libraries compute as ``TIDEKV_CPU`` says, this process's children included.

    They look at their variables once, so this comes before torch's first product: programs call it when they start.

    Raises:
        ConfigError: ``TIDEKV_CPU`` names no kind.
    """
    limit = cpu_limit()
    for variable, settings in _LIBRARIES.items():
        if limit in settings:
            os.environ[variable] = settings[limit][0]


def cpu_has_bf16() -> bool:
    """Whether the CPU, as the kind it works as, multiplies bfloat16 natively (AVX512-BF16, AMX, or Arm BF16)."""
    return cpu_kind() in _NATIVE_BF16


def prefers_tiles(element_size: int) -> bool:
    """Whether a CPU attends faster on tiles than with torch's fused kernel, to numbers of so many bytes.

    A tile is two plain matrix products: where the CPU multiplies bfloat16 natively they are several times as fast as
    the fused kernel, which computes in float32 (550 against 150 GFLOP/s on two cores). Everywhere else the fused
    kernel reads the keys once and wins, 1.5 times in float32 and three times in bfloat16.
    """
    return element_size == 2 and cpu_has_bf16()


def cpu_name() -> str:
    """As its maker calls it, or just the architecture."""
    return str(_capabilities().get("cpu_name") or platform.processor() or platform.machine())


def cores() -> int:
    """Cores this process may use, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


def _ladder() -> dict[str, set[str]]:
    return _ARM if platform.machine().lower() in ("arm64", "aarch64") else _X86


def _library_limit(variable: str) -> str | None:
    value = os.environ.get(variable, "").lower()
    settings = _LIBRARIES[variable].items()
    return next((kind for kind, names in settings if value in (name.lower() for name in names)), None)


def _cpu_flags() -> set[str]:
    """What the CPU can do, by torch's names."""
    import torch

    found = {name for name, value in _capabilities().items() if value is True} or _flags_of_linux()
    # Without oneDNN (macOS) torch has no bfloat16 product for Arm that is faster than float32.
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return found if has_onednn else found - {"bf16"}


@functools.cache
def _capabilities() -> Mapping[str, Any]:
    """What torch found out, the same on every system; empty before torch 2.10."""
    import torch

    ask = getattr(torch.cpu, "get_capabilities", None)
    return {} if ask is None else ask()


def _flags_of_linux(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The kernel's flags by torch's names (avx512_bw for avx512bw, fma3 for fma); empty on other systems."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    flags = next((line.split(":", 1)[-1] for line in lines if line.lower().startswith(("flags", "features"))), "")
    plain = {name: name.replace("_", "") for needed in (*_X86.values(), *_ARM.values()) for name in needed}
    given = {flag.replace("_", "") for flag in flags.split()} | ({"fma3"} if "fma" in flags.split() else set())
    return {name for name, short in plain.items() if short in given}


# -- the device -----------------------------------------------------------------------------------------------


def default_device() -> torch.device:
    """The first GPU if there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device | None = None) -> torch.dtype:
    """bfloat16 where the device multiplies it natively (GPUs from Ampere on, see :func:`cpu_has_bf16`), else float32.

    Args:
        device: default: :func:`default_device`.

    Raises:
        ConfigError: ``TIDEKV_CPU`` names no kind, or more than the CPU has.
    """
    import torch

    kind = (device or default_device()).type
    if kind == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = kind == "cpu" and cpu_has_bf16()
    return torch.bfloat16 if native else torch.float32


def stored_as(checkpoint: torch.dtype | None, device: torch.device) -> torch.dtype:
    """What a checkpoint's weights are stored as where nobody says: in two bytes, unless that would be slow or lose.

    A checkpoint in two bytes stays so, as bfloat16: float16's range is too small for some models' hidden states. One
    in float32 is narrowed where the device multiplies bfloat16 natively.
    """
    import torch

    two_bytes = checkpoint is not None and checkpoint.itemsize == 2
    return torch.bfloat16 if two_bytes and device.type == "cpu" else default_dtype(device)


def fastest_compute(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """What layers stored so are computed in where nobody says.

    On a CPU that does not multiply bfloat16 natively, and for float16 on any, float32 is four times as fast.
    """
    import torch

    slow = stored == torch.float16 or (stored == torch.bfloat16 and not cpu_has_bf16())
    return torch.float32 if device.type == "cpu" and slow else stored


def processor(device: torch.device) -> str:
    """What decides the last bits of a product: the device, for a CPU the instructions that torch really uses."""
    import torch

    if device.type != "cpu":
        return device.type
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {cpu_kind()}"
