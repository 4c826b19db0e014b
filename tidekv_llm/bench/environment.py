"""What a figure depends on besides the code: written into every result file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command line, as JSON types."""
    import psutil
    import torch
    import transformers

    from tidekv_llm import hardware
    from tidekv_llm.version import __version__

    return {
        "command": " ".join(["tidekv", *sys.argv[1:]]),
        "tidekv": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "cpu": hardware.cpu_name(),
        "cpu_kind": hardware.cpu_kind(),
        "cores": hardware.cores(),
        "torch_threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
    }


def commit() -> str | None:
    """The commit of a checkout; None for an installed package."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
