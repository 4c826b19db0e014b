"""Put torch into the running environment without ever pulling CUDA wheels onto a machine without CUDA.

    python .ci/install_torch.py [VERSION]

1. A torch that can already be imported, and is new enough, stays.
2. Else pip is asked, without installing, which build of VERSION it would take and what that needs.
   A build without CUDA packages is installed; one with them only where there is an NVIDIA driver.
3. Else nothing is installed, and one line says what to do.

Only the standard library and pip's own parts are used: this runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

DEFAULT_VERSION = "2.13.0"
OLDEST = (2, 9)

HELP = (
    "pip would take a CUDA build of torch {version} ({packages}; several gigabytes), but this machine has no "
    "NVIDIA driver. Point pip at a CPU build and run the command again: set PIP_INDEX_URL or PIP_FIND_LINKS "
    "as PyTorch's 'Get started' page shows for 'CPU', or install torch into .venv yourself."
)


def installed_version() -> str | None:
    """Version of the torch that can be imported here, or None; asked in a child so that ours stays clean."""
    code = "import torch; print(torch.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def is_new_enough(version: str) -> bool:
    """``"2.13.0+cpu"`` is, ``"2.8.1"`` is not."""
    numbers = re.findall(r"\d+", version)[:2]
    return tuple(int(number) for number in numbers) >= OLDEST


def has_cuda() -> bool:
    """Whether an NVIDIA driver answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def cuda_packages(requirements: Iterable[str]) -> list[str]:
    """Names of the CUDA packages among the requirements that apply to this machine."""
    from pip._vendor.packaging.requirements import Requirement

    def applies(one: Requirement) -> bool:
        return one.marker is None or one.marker.evaluate({"extra": ""})

    names = {one.name.lower() for one in map(Requirement, requirements) if applies(one)}
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def requirements_of(version: str) -> list[str]:
    """What the build that pip would take says it needs.

    Its dependencies are not resolved: for a CUDA build that alone can fetch gigabytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        question = ("--dry-run", "--no-deps", "--ignore-installed", "--report", report)
        pip("install", *question, f"torch=={version}")
        with open(report, encoding="utf-8") as file:
            found = json.load(file)["install"][0]
    return list(found["metadata"].get("requires_dist", []))


def pip(*arguments: str) -> None:
    """Run pip of this environment; its own messages say what went wrong."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def main(arguments: list[str]) -> int:
    """Install torch, or say why not; the exit code says which."""
    version = arguments[0] if arguments else DEFAULT_VERSION
    present = installed_version()
    if present is not None and is_new_enough(present):
        print(f"torch {present} is there already")
        return 0
    try:
        packages = cuda_packages(requirements_of(version))
        if packages and not has_cuda():
            print(HELP.format(version=version, packages=", ".join(packages[:3])), file=sys.stderr)
            return 1
        print(f"installing torch {version} ({'CUDA' if packages else 'CPU'} build)")
        pip("install", f"torch=={version}")
    except subprocess.CalledProcessError as error:
        print(f"pip could not install torch {version} (exit code {error.returncode})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
