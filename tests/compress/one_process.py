"""``python -m tests.compress.one_process OPTIONS LENGTH...``: one engine, prompts of these lengths one after another.

Prints, as JSON, what the cache of the last one keeps and how its answer goes on.
"""

from __future__ import annotations

import json
import sys

import torch

from tests.tiny_models import tiny_model
from tidekv_llm import PrefillConfig, TideKV


def last_of(options: dict[str, object], lengths: list[int]) -> dict[str, object]:
    """Kept positions per layer and head and the generated tokens of the last prompt."""
    config = PrefillConfig(chunk_size=64, window_size=8, sinks=2, kernel_size=5).replace(**options)
    engine = TideKV(tiny_model("llama", num_hidden_layers=4), prefill=config)
    for length in lengths:
        prompt = torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(length))
        cache = engine.prefill(prompt).cache
        tokens = engine.generate(prompt, max_new_tokens=6).token_ids
    heads = range(engine.shape.num_kv_heads)
    kept = [[cache.positions(layer, head).tolist() for head in heads] for layer in range(4)]
    return {"kept": kept, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(last_of(json.loads(sys.argv[1]), [int(length) for length in sys.argv[2:]])))
