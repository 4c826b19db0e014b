"""GPU checks on random weights of Llama-3.1-8B's shape: equality, no synchronisation per chunk, peaks and TTFT.

Prints one table; exits with 0 if every check held or there is no GPU, with 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

CHECK_TOKENS = 3000
MEASURED_TOKENS = (8192, 32768, 65536)
SCHEDULES = ("tidekv", "post-prefill")


def main() -> int:
    """Run the checks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="layers of the random model (default: 32)")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("skipped: torch is not installed")
        return 0
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device")
        return 0
    return _checks(options.layers)


def _checks(layers: int) -> int:
    import torch

    from tidekv_llm.attention import flash_attn_available
    from tidekv_llm.bench.models import open_model
    from tidekv_llm.config import PrefillConfig

    config = PrefillConfig(chunk_size=2048, kept_tokens=4096)
    needed = max(MEASURED_TOKENS) + 64
    failures = []
    with open_model("random:llama-3.1-8b", config=config, needed_tokens=needed, layers=layers) as llm:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, flash-attn {flash_attn_available()}")
        print(f"weights {torch.cuda.memory_allocated() / 2**30:.2f} GiB, the self-check held")
        failures += _equal(llm)
        failures += _no_synchronisation(llm)
        for schedule in SCHEDULES:
            for length in MEASURED_TOKENS:
                _measure(llm.with_prefill(schedule=schedule), length)
    for failure in failures:
        print(f"FAILED: {failure}")
    print("all checks held" if not failures else f"{len(failures)} checks failed")
    return 1 if failures else 0


def _prompt(length: int) -> Any:
    import torch

    return torch.randint(1000, 100_000, (length,), generator=torch.Generator().manual_seed(length))


def _equal(llm: Any) -> list[str]:
    """Every attention backend that runs here, and any chunk size, gives the same logits up to rounding."""
    import torch

    ids = _prompt(CHECK_TOKENS)
    reference = llm.model(ids[None].to(llm.device), use_cache=False, logits_to_keep=1).logits[0, -1].float()
    failures = []
    for attention in ("tiled", "sdpa", "auto"):
        for chunk_size in (512, 2048):
            found = llm.with_prefill(attention=attention, chunk_size=chunk_size).prefill(ids).logits
            error = float((found - reference).norm() / reference.norm())
            print(f"attention={attention:6} chunk={chunk_size:5} relative L2 of the logits {error:.4f}")
            if not error < 0.05:
                failures.append(f"attention={attention}, chunk_size={chunk_size}: error {error:.4f}")
    torch.cuda.empty_cache()
    return failures


def _no_synchronisation(llm: Any) -> list[str]:
    """Twice as many chunks must not mean more synchronising calls: at most a few per layer."""
    import warnings

    import torch

    counts = []
    for chunk_size in (2048, 1024):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                llm.with_prefill(chunk_size=chunk_size).prefill(_prompt(8192))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counts.append(len(caught))
    print(f"synchronising calls at 4 and 8 chunks per layer: {counts}")
    return [] if counts[1] <= counts[0] + 4 else [f"synchronising calls grow with the chunks: {counts}"]


def _measure(llm: Any, length: int) -> None:
    from tidekv_llm.errors import MemoryLimitError

    ids = _prompt(length).tolist()
    try:
        llm.generate(ids[:4096], max_new_tokens=2, ignore_eos=True)
        metrics = llm.generate(ids, max_new_tokens=17, ignore_eos=True).metrics
    except MemoryLimitError as error:
        print(f"{llm.config.schedule:13} {length:7,} tokens: {error}")
        return
    allocated, reserved = (metrics.peaks[name] or 0 for name in ("allocated", "reserved"))
    print(
        f"{llm.config.schedule:13} {length:7,} tokens: peak {allocated / 2**30:6.2f} GiB allocated, "
        f"{reserved / 2**30:6.2f} reserved, TTFT {metrics.ttft_seconds:6.2f} s, "
        f"{metrics.decode_tokens_per_second:5.1f} token/s, cache {metrics.cache_bytes / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
