"""Decode rate of the two layouts at the same total of kept positions."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.bench.corpus import corpus_prompt
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.decode.loop import DecodeAdapter
from tidekv_llm.engine import TideKV


def decode_rates(
    llm: TideKV, *, prompt_tokens: int = 2048, kept_tokens: int = 1024, new_tokens: int = 32, repeats: int = 3
) -> dict[str, float]:
    """Tokens per second with rectangular, flattened, head-adaptive and quantised caches, alternating."""
    assert llm.tokenizer is not None
    prompt = corpus_prompt(llm.tokenizer, prompt_tokens)
    variants: dict[str, dict[str, Any]] = {
        "rectangular": {"layout": "rectangular"},
        "flattened": {"layout": "flattened"},
        "ada": {"head_budget": "ada"},
        "8 bits": {"kv_bits": 8},
        "2 bits": {"kv_bits": 2},
    }
    caches = {
        name: llm.with_prefill(kept_tokens=kept_tokens, **options).prefill(prompt, reserve=new_tokens + 1).cache
        for name, options in variants.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, cache in caches.items():
            rates[name].append(_rate(llm, cache, new_tokens))
    return {name: median(each) for name, each in rates.items()}


def _rate(llm: TideKV, cache: CompressedCache, new_tokens: int) -> float:
    adapter, token = DecodeAdapter(llm.decoder, cache, AttentionDispatch()), torch.tensor([[5]])
    adapter.step(token)
    begin = time.perf_counter()
    for _ in range(new_tokens):
        adapter.step(token)
    rate = new_tokens / (time.perf_counter() - begin)
    for layer in cache.layers:
        layer.reset()
    return rate


if __name__ == "__main__":
    with TideKV.from_pretrained("smollm2-135m") as engine:
        print(decode_rates(engine))
