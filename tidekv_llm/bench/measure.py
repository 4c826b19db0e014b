"""One measurement in this process: load, warm up, run one prompt, report as JSON-ready numbers.

What is measured: ``transient_bytes`` is the process peak while the cache is built minus the resident size just
before (weights loaded, warmed up); ``ttft_seconds`` ends with the first token. First-call costs (kernel
selection, page faults of fresh weights) are no part of a method, so a short prompt runs first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidekv_llm.bench.corpus import corpus_prompt
from tidekv_llm.config import PrefillConfig
from tidekv_llm.engine import TideKV
from tidekv_llm.memory import MemoryMeter, weight_bytes

HF_ONE_SHOT = "hf-one-shot"
WARM_UP_TOKENS = 600


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    Attributes:
        method: ``hf-one-shot`` or the name of a schedule.
        model: alias, id or folder.
        prompt_tokens: S.
        kept_tokens: K.
        chunk_size: C.
        new_tokens: tokens to decode; the first one ends the time to first token.
        prompt_index: which part of the corpus.
    """

    method: str
    model: str = "smollm2-135m"
    prompt_tokens: int = 8192
    kept_tokens: int = 1024
    chunk_size: int = 512
    new_tokens: int = 33
    prompt_index: int = 0


def measure(what: Measurement) -> dict[str, Any]:
    """Run it and return the figures."""
    needed = what.prompt_tokens + what.new_tokens
    config = PrefillConfig(
        kept_tokens=what.kept_tokens,
        chunk_size=what.chunk_size,
        schedule="tidekv" if what.method == HF_ONE_SHOT else what.method,
    )
    with TideKV.from_pretrained(what.model, prefill=config) as llm:
        # A few decoded tokens past the trained window do not matter here, switching YaRN on would.
        llm.context_window = max(llm.context_window, needed)
        assert llm.tokenizer is not None
        prompt = corpus_prompt(llm.tokenizer, what.prompt_tokens, what.prompt_index)
        run = _hf_one_shot if what.method == HF_ONE_SHOT else _engine
        run(llm, prompt[:WARM_UP_TOKENS], 3)
        return run(llm, prompt, what.new_tokens)


def _engine(llm: TideKV, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    before = MemoryMeter(llm.device, weights=0)
    with before:
        resident = before.report().before_bytes
    # Past any end of sequence, so that every method decodes equally many tokens.
    generation = llm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True)
    metrics = generation.metrics
    return {
        "ttft_seconds": metrics.ttft_seconds,
        "transient_bytes": metrics.construction_peak_bytes - resident,
        "compress_share": metrics.compress_seconds / metrics.ttft_seconds,
        "decode_tokens_per_second": metrics.decode_tokens_per_second,
        "cache_bytes": metrics.cache_bytes,
        "components": metrics.components,
        "token_ids": generation.token_ids,
    }


class _Clock:
    """A transformers streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _hf_one_shot(llm: TideKV, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """``model.generate`` as transformers ships it, with SDPA attention and a growing cache."""
    ids = torch.tensor([prompt], device=llm.device)
    clock = _Clock()
    with MemoryMeter(llm.device, weights=weight_bytes(llm.model)) as meter:
        begin = time.perf_counter()
        output = llm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            streamer=clock,
        )
        report = meter.report()
    first, last = clock.times[1], clock.times[-1]  # the prompt itself is put first
    return {
        "ttft_seconds": first - begin,
        "transient_bytes": report.construction_peak_bytes - report.before_bytes,
        "compress_share": 0.0,
        "decode_tokens_per_second": (new_tokens - 1) / (last - first),
        "cache_bytes": 0,
        "components": {},
        "token_ids": output[0, len(prompt) :].tolist(),
    }
