"""A selector of your own in ten lines: keep the keys whose values are longest.

python examples/custom_selector.py [FILE [QUESTION]]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tidekv_llm import Document, PrefillConfig, Selector, TideKV, register_selector


@register_selector
@dataclass(frozen=True)
class LongValues(Selector):
    """Query-agnostic: the length of each value vector."""

    name: ClassVar[str] = "long-values"

    def scorer(self, layer: Any, block_size: int) -> Any:
        # Keys [start, stop) of the finished layer; scores [batch, kv_heads, stop - start], the highest stay.
        return lambda start, stop: layer.values[:, :, start:stop].float().norm(dim=-1)


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("lighthouse.pdf"))
    question = sys.argv[2] if len(sys.argv) > 2 else "Who was the first keeper of the lighthouse?"
    config = PrefillConfig(selector="long-values", kept_tokens=512)
    with TideKV.from_pretrained("smollm2-135m", prefill=config) as llm:
        print(llm.ask(Document.from_file(path), question).text)
