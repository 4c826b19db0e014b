"""Importing an integration loads nothing heavy, no torch; the namespace of LlamaIndex stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What takes seconds or hundreds of megabytes to import, and the readers and servers that few callers need.
HEAVY = {"torch", "transformers", "accelerate", "safetensors", "gguf", "bm25s", "scipy", "pandas", "pypdf", "gradio"}


@pytest.mark.parametrize("module", ["langchain_tidekv", "llama_index.llms.tidekv"])
def test_import_is_light(module: str) -> None:
    """What is imported, not how long it takes: that differs with the machine and with what else it does."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'integrations'}", "PATH": "", "HOME": str(Path.home())},
    )
    loaded = set(json.loads(done.stdout))
    assert module in loaded
    assert not HEAVY & loaded


def test_namespace_packages_have_no_init() -> None:
    package = ROOT / "integrations" / "llama_index"
    assert not (package / "__init__.py").exists()
    assert not (package / "llms" / "__init__.py").exists()
    import llama_index.core

    import llama_index.llms.tidekv

    assert llama_index.core.__file__
    assert llama_index.llms.tidekv.__file__
