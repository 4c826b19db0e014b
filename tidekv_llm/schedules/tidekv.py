"""``tidekv``: layer-major, chunk by chunk, evicting at each layer's end (paper, Algorithm 1)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job


class TideSchedule:
    """The paper's schedule: its highest memory is one layer's KV, the bridge and one chunk's activations."""

    name = "tidekv"
    reuses_prefix = True

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        return prefill_layers(decoder, token_ids, job, chunk_size=job.chunk_size, boundaries=job.boundaries)


SCHEDULE = TideSchedule()
