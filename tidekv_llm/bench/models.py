"""The models of benchmarks: anything the engine loads, or random weights of a shipped shape."""

from __future__ import annotations

from typing import Any

from tidekv_llm.bench.corpus import corpus_prompt
from tidekv_llm.config import PrefillConfig
from tidekv_llm.engine import TideKV
from tidekv_llm.models.shapes import RANDOM_PREFIX, find_config

EMBEDDED = "smollm2-135m"
EMBEDDED_WINDOW = 8192
DECODE_SLACK = 256


def open_model(model: str, *, config: PrefillConfig, needed_tokens: int, layers: int | None = None) -> TideKV:
    """An engine that takes ``needed_tokens``; ``random:NAME`` builds random weights, ``layers`` of them."""
    if model.startswith(RANDOM_PREFIX):
        return _random(model, config, needed_tokens, layers)
    # A few decoded tokens past the trained window do not matter in a benchmark; switching YaRN on for them would.
    stretched = needed_tokens > EMBEDDED_WINDOW + DECODE_SLACK
    window = (needed_tokens if stretched else EMBEDDED_WINDOW) if model == EMBEDDED else None
    llm = TideKV.from_pretrained(model, prefill=config, context_window=window)
    llm.context_window = max(llm.context_window, needed_tokens)
    return llm


def _random(model: str, config: PrefillConfig, needed_tokens: int, layers: int | None) -> TideKV:
    import torch
    from transformers import AutoModelForCausalLM

    from tidekv_llm.hardware import default_device, default_dtype

    device = default_device()
    torch.manual_seed(0)
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        built: Any = AutoModelForCausalLM.from_config(find_config(model, layers=layers), dtype=default_dtype(device))
    finally:
        torch.set_default_device(before)
    window = max(needed_tokens, int(built.config.max_position_embeddings))
    return TideKV(built.eval().requires_grad_(False), prefill=config, context_window=window, name=model)


def make_prompt(llm: TideKV, length: int, index: int = 0) -> list[int]:
    """Real text for a model with a tokenizer, random ids for random weights."""
    if llm.tokenizer is not None:
        return corpus_prompt(llm.tokenizer, length, index)
    import torch

    generator = torch.Generator().manual_seed(index)
    vocabulary = int(llm.model.config.vocab_size)
    ids: list[int] = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    return ids
