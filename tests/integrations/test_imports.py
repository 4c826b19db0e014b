"""Importing an integration is quick and loads no torch, and the namespace of LlamaIndex stays whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json, sys, time
began = time.process_time()
import {module}
print(json.dumps([time.process_time() - began, "torch" in sys.modules, "transformers" in sys.modules]))
"""


@pytest.mark.parametrize("module", ["langchain_tidekv", "llama_index.llms.tidekv"])
def test_import_is_light(module: str) -> None:
    """CPU seconds: they do not depend on what else the machine does. The best of three: the first compiles."""
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", CODE.format(module=module)],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'integrations'}", "PATH": "", "HOME": str(Path.home())},
        )
        taken, torch, transformers = json.loads(done.stdout)
        assert not torch
        assert not transformers
        seconds.append(taken)
    assert min(seconds) < 1.5


def test_namespace_packages_have_no_init() -> None:
    package = ROOT / "integrations" / "llama_index"
    assert not (package / "__init__.py").exists()
    assert not (package / "llms" / "__init__.py").exists()
    import llama_index.core

    import llama_index.llms.tidekv

    assert llama_index.core.__file__
    assert llama_index.llms.tidekv.__file__
