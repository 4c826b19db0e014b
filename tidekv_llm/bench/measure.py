"""One measurement in this process: load, warm up, run one prompt, report as JSON-ready numbers.

What is measured: ``transient_bytes`` is the peak while the cache is built minus what was there just before (weights
loaded, warmed up): the process on a CPU, allocated memory on CUDA. ``above_steady_bytes`` is the peak minus what is
there afterwards, the cache included: the paper's transient footprint. ``ttft_seconds`` ends with the first token.
First-call costs (kernel selection, page faults of fresh weights) are no part of a method, so every method runs the
prompt once before it is measured. On a CPU they are not small: oneDNN keeps a kernel for every new matrix shape, and
the first prompt of a new length takes about 20 MiB more than the second.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch import Tensor

from tidekv_llm.bench.models import make_prompt, open_model
from tidekv_llm.bench.task import HF_ONE_SHOT, Measurement
from tidekv_llm.config import PrefillConfig
from tidekv_llm.engine import TideKV
from tidekv_llm.errors import MemoryLimitError
from tidekv_llm.memory import MemoryMeter, weight_bytes
from tidekv_llm.memory.probes import return_free_heap

WARM_UP_TOKENS = 600


def measure(what: Measurement) -> dict[str, Any]:
    """Run it and return the figures."""
    needed = what.prompt_tokens + what.new_tokens
    config = PrefillConfig(
        kept_tokens=what.kept_tokens,
        chunk_size=what.chunk_size,
        schedule="tidekv" if what.method == HF_ONE_SHOT else what.method,
        bridge=what.bridge,
    )
    with open_model(what.model, config=config, needed_tokens=needed, layers=what.layers) as llm:
        prompt = make_prompt(llm, what.prompt_tokens, what.prompt_index)
        run = _hf_one_shot if what.method == HF_ONE_SHOT else _engine
        # Under a memory limit the prompt itself may not fit: a short one has to do.
        run(llm, prompt[:WARM_UP_TOKENS] if what.memory_limit else prompt, min(3, what.new_tokens))
        tidy_heap()
        if not what.memory_limit:
            return run(llm, prompt, what.new_tokens)
        return _limited(llm, run, prompt, what)


def tidy_heap() -> None:
    """Give freed memory back to the system, so that what a method takes is seen as new."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return_free_heap()


def _limited(llm: TideKV, run: Any, prompt: list[int], what: Measurement) -> dict[str, Any]:
    """Run under a limit on memory; running into it is a result, not an error."""
    _limit_memory(what.memory_limit)
    try:
        return {"completed": True, **run(llm, prompt, what.new_tokens)}
    except (MemoryLimitError, MemoryError, torch.OutOfMemoryError):
        return {"completed": False}
    except RuntimeError as error:
        if "memory" in str(error):
            return {"completed": False}
        raise


def _limit_memory(limit: int) -> None:
    """The allocator's share on CUDA; on a CPU the kernel's limit on private memory (RLIMIT_DATA)."""
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + limit) / total))
        return
    import resource

    import psutil

    data = int(getattr(psutil.Process().memory_info(), "data", 0))
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, data + limit))


def _engine(llm: TideKV, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    before = MemoryMeter(llm.device, weights=0)
    with before:
        resident = before.report().before_bytes
    # Past any end of sequence, so that every method decodes equally many tokens.
    generation = llm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, drafts=0)
    metrics = generation.metrics
    return {
        "ttft_seconds": metrics.ttft_seconds,
        "peak_bytes": metrics.construction_peak_bytes,
        "transient_bytes": metrics.construction_peak_bytes - resident,
        "above_steady_bytes": max(0, metrics.construction_peak_bytes - resident - metrics.cache_bytes),
        "compress_share": metrics.compress_seconds / metrics.ttft_seconds,
        "decode_tokens_per_second": metrics.decode_tokens_per_second,
        "cache_bytes": metrics.cache_bytes,
        "components": metrics.components,
        "peaks": metrics.peaks,
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
    clock = _Clock()
    with MemoryMeter(llm.device, weights=weight_bytes(llm.model)) as meter:
        begin = time.perf_counter()
        output = _generate(llm, prompt, new_tokens, clock)
        report = meter.report()
    first, last = clock.times[1], clock.times[-1]  # the prompt itself is put first
    return {
        "ttft_seconds": first - begin,
        "peak_bytes": report.construction_peak_bytes,
        "transient_bytes": report.construction_peak_bytes - report.before_bytes,
        "above_steady_bytes": max(0, report.construction_peak_bytes - report.before_bytes - _full_kv(llm, prompt)),
        "compress_share": 0.0,
        "decode_tokens_per_second": (new_tokens - 1) / (last - first) if last > first else 0.0,
        "cache_bytes": 0,
        "components": {},
        "peaks": dict(report.peaks),
        "token_ids": output[0, len(prompt) :].tolist(),
    }


def generate_times(llm: TideKV, prompt: list[int], new_tokens: int) -> list[float]:
    """When ``model.generate`` gave the prompt back and each new token."""
    clock = _Clock()
    _generate(llm, prompt, new_tokens, clock)
    return clock.times


def _generate(llm: TideKV, prompt: list[int], new_tokens: int, clock: _Clock) -> Tensor:
    ids = torch.tensor([prompt], device=llm.device)
    output: Tensor = llm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
    )
    return output


def _full_kv(llm: TideKV, prompt: list[int]) -> int:
    """Bytes of the full KV that the growing cache ends with."""
    return llm.shape.num_layers * llm.shape.kv_bytes(len(prompt))


def measure_job(**fields: Any) -> dict[str, Any]:
    """:func:`measure` for a child process."""
    return measure(Measurement(**fields))


__all__ = ["HF_ONE_SHOT", "WARM_UP_TOKENS", "Measurement", "generate_times", "measure", "measure_job", "tidy_heap"]
