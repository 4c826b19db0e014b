"""The README's Python examples run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.S | re.M)


def test_there_is_an_example_for_each_way_in() -> None:
    assert len(EXAMPLES) == 3
    for name in ("tidekv_llm", "langchain_tidekv", "llama_index.llms.tidekv"):
        assert any(f"from {name} import" in example for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=["library", "langchain", "llama-index"])
def test_the_example_runs_and_prints_an_answer(example: str, embedded_model_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # The model prefers each token of the name at least 10 to 1 in float32: tests/integrations/test_examples.py.
    assert "Tobias Renn" in done.stdout
