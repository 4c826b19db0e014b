"""Importing an integration is quick and loads no torch, and the namespace of LlamaIndex stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"accelerate", "bm25s", "gguf", "pypdf", "safetensors", "scipy", "torch", "transformers"}


@pytest.mark.parametrize("module", ["langchain_tidekv", "llama_index.llms.tidekv", "tidekv_llm.service"])
def test_import_is_light(module: str) -> None:
    """What takes long is imported when a model is used."""
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'integrations'}", "PATH": "", "HOME": str(Path.home())},
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & HEAVY
    assert "pydantic" not in loaded or module != "tidekv_llm.service"


def test_namespace_packages_have_no_init() -> None:
    package = ROOT / "integrations" / "llama_index"
    assert not (package / "__init__.py").exists()
    assert not (package / "llms" / "__init__.py").exists()
    import llama_index.core

    import llama_index.llms.tidekv

    assert llama_index.core.__file__
    assert llama_index.llms.tidekv.__file__
