"""``kivi``: the whole prompt per layer, then 2-bit keys per channel and values per token (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job

BITS = 2
RESIDUAL = 128  # most recent positions in full precision, as in the original


class KiviSchedule:
    """Prefill in full precision, layer by layer; only what decode reads is quantised, once.

    The original also packs decoded tokens, 128 at a time; answers here are shorter than that matters. Sliding-window
    layers keep their window in full precision.
    """

    name = "kivi"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        length, config = token_ids.shape[1], job.compressor.config
        everything = config.replace(
            kept_tokens=max(length, config.window_size + config.sinks),
            layer_budget="uniform",
            head_budget="uniform",
            layout="auto",
            kv_bits=BITS,
            kv_residual=RESIDUAL,
        )
        quantised = replace(job, compressor=replace(job.compressor, config=everything))
        return prefill_layers(decoder, token_ids, quantised, chunk_size=length)


SCHEDULE = KiviSchedule()
