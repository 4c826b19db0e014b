"""What is shipped, what it pulls in, and what must never be in the repository."""

from __future__ import annotations

import ast
import email
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = {
    "tidekv_llm": ROOT / "tidekv_llm",
    "tidekv_fields": ROOT / "integrations/tidekv_fields",
    "langchain_tidekv": ROOT / "integrations/langchain_tidekv",
    "llama_index": ROOT / "integrations/llama_index",
    "tidekv_apps": ROOT / "apps/tidekv_apps",
}
# Someone else's package owns these folders: with a file of ours, `import llama_index.core` breaks.
NAMESPACES = ("llama_index/__init__.py", "llama_index/llms/__init__.py")


# --- the wheel ---


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_is_typed_and_has_every_module(wheel):
    names = set(wheel.namelist())
    assert "tidekv_llm/py.typed" in names
    for package, source in SOURCES.items():
        modules = {f"{package}/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")}
        assert modules <= names


@pytest.mark.parametrize("folder", ["templates", "static", "samples"])
def test_the_wheel_has_what_the_page_is_made_of(wheel, folder):
    source = SOURCES["tidekv_apps"]
    files = {f"tidekv_apps/{path.relative_to(source).as_posix()}" for path in (source / folder).iterdir()}
    assert files and files <= set(wheel.namelist())


def test_the_wheel_has_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} <= set(SOURCES)
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name in NAMESPACES]


def test_the_wheel_says_what_it_is(wheel):
    (info,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(info))
    assert metadata["Name"] == "tidekv-llm"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert f"{Path(info).parent}/licenses/LICENSE" in wheel.namelist()
    entry_points = wheel.read(f"{Path(info).parent}/entry_points.txt").decode()
    assert "tidekv = tidekv_llm.cli:main" in entry_points


def test_shared_namespaces_hold_no_init_file():
    assert not [name for name in NAMESPACES if (ROOT / "integrations" / name).exists()]


def test_the_core_needs_no_framework():
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert names.isdisjoint({"langchain-core", "llama-index-core", "gradio", "fastapi", "flash-attn", "matplotlib"})


IMPORT_NAMES = {"llama-index-core": "llama_index", "python-multipart": "python_multipart"}
EXTRAS_OF = {
    "tidekv_llm": ("flash", "preview", "bench", "langchain", "app"),  # inside functions only
    "tidekv_fields": ("langchain", "llama-index"),
    "langchain_tidekv": ("langchain",),
    "llama_index": ("llama-index",),
    "tidekv_apps": ("app", "preview"),
}


def imported(source: Path, *, late: bool) -> set[str]:
    """Top-level names that a package imports: everywhere, or only where importing the package imports them."""
    found = set()
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree) if late else tree.body:
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - set(SOURCES) - {"__future__"}


def names_of(requirements: list[str]) -> set[str]:
    names = (re.split(r"[^\w.-]", requirement)[0] for requirement in requirements)
    return {IMPORT_NAMES.get(name, name).replace("-", "_") for name in names}


@pytest.mark.parametrize("package", SOURCES)
def test_what_is_imported_is_declared(package):
    """Also what another dependency happens to bring: it may stop to."""
    extras = PROJECT["optional-dependencies"]
    core = names_of(PROJECT["dependencies"])
    everything = core.union(*(names_of(extras[extra]) for extra in EXTRAS_OF[package]))
    assert imported(SOURCES[package], late=True) <= everything
    assert imported(SOURCES[package], late=False) <= (core if package == "tidekv_llm" else everything)


def test_the_floors_that_are_tested_are_the_floors_that_are_declared():
    declared = dict(re.match(r"([\w-]+)\S*?>=([\d.]+)", one).groups() for one in PROJECT["dependencies"] if ">=" in one)
    declared.pop("torch")  # chosen by make test-floor, from what pip can reach
    tested = dict(line.split("==") for line in (ROOT / ".ci/floor.txt").read_text().split())
    assert tested == declared


# --- the repository ---


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_registry_and_no_machine_path_is_named():
    # Written in pieces, or this file would be the first to be found.
    hosts = ["pypi" + r"\.org", "pythonhosted" + r"\.org", "download" + r"\.pytorch\.org", "npmjs" + r"\.org"]
    paths = [re.escape(str(ROOT)) + r"\b"]
    pattern = re.compile("|".join(hosts + paths))
    found = {}
    for path in tracked_files():
        match = pattern.search(path.read_bytes().decode("utf-8", errors="ignore"))
        if match:
            found[str(path.relative_to(ROOT))] = match.group()
    assert found == {}


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # This suite may itself run under make, whose variables must not reach the inner one.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", ["demo", "test", "lint", "test-floor", "bench"])
def test_the_commands_of_the_house_exist(target):
    done = make("-n", target)
    assert done.returncode == 0, done.stderr


def test_an_old_python_is_refused_in_one_line(tmp_path):
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    venv = tmp_path / "venv"
    done = make(f"VENV={venv}", f"PYTHON={old}", f"{venv}/.python")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].startswith("TideKV needs Python 3.11 or newer")
    assert not venv.exists()


# --- which torch ---

CUDA_BUILD = [
    "filelock",
    'nvidia-cublas-cu12==12.8.4.1; platform_system != "Nowhere"',
    'cuda-bindings<14,>=13.0.3; python_version >= "3"',
    'nvidia-other; platform_system == "Nowhere"',
    'nvidia-extra; extra == "opt"',
]


@pytest.fixture
def installer(monkeypatch) -> ModuleType:
    """The script as a module, with a machine that has no torch and pip calls that are only noted down."""
    spec = importlib.util.spec_from_file_location("install_torch", ROOT / ".ci/install_torch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []
    monkeypatch.setattr(module, "pip", lambda *arguments: module.calls.append(arguments))
    monkeypatch.setattr(module, "installed_version", lambda: None)
    monkeypatch.setattr(module, "has_cuda", lambda: False)
    return module


def test_a_torch_that_is_there_stays(installer, monkeypatch):
    monkeypatch.setattr(installer, "installed_version", lambda: "2.9.1+cu128")
    assert installer.main([]) == 0
    assert installer.calls == []


@pytest.mark.parametrize(("version", "expected"), [("2.9.0", True), ("2.13.0+cpu", True), ("2.8.1", False)])
def test_versions_compare_as_numbers(installer, version, expected):
    assert installer.is_new_enough(version) is expected


def test_a_cpu_build_is_installed(installer, monkeypatch):
    monkeypatch.setattr(installer, "requirements_of", lambda version: ["filelock", "sympy>=1.13"])
    monkeypatch.setattr(installer, "installed_version", lambda: "2.8.0")
    assert installer.main(["2.13.0"]) == 0
    assert installer.calls == [("install", "torch==2.13.0")]


def test_a_cuda_build_is_refused_without_a_driver(installer, monkeypatch, capsys):
    monkeypatch.setattr(installer, "requirements_of", lambda version: CUDA_BUILD)
    assert installer.main([]) == 1
    assert installer.calls == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "cuda-bindings, nvidia-cublas-cu12" in line
    assert "PIP_INDEX_URL" in line


def test_a_cuda_build_is_welcome_with_a_driver(installer, monkeypatch):
    monkeypatch.setattr(installer, "requirements_of", lambda version: CUDA_BUILD)
    monkeypatch.setattr(installer, "has_cuda", lambda: True)
    assert installer.main(["2.9.0"]) == 0
    assert installer.calls == [("install", "torch==2.9.0")]


def test_only_requirements_of_this_machine_count(installer):
    assert installer.cuda_packages(CUDA_BUILD) == ["cuda-bindings", "nvidia-cublas-cu12"]


def test_a_failing_pip_is_one_line(installer, monkeypatch, capsys):
    def fail(version):
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(installer, "requirements_of", fail)
    assert installer.main([]) == 1
    assert capsys.readouterr().err.splitlines() == ["pip could not install torch 2.13.0 (exit code 1)"]
