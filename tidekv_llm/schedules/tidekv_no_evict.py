"""``tidekv-no-evict``: layer-major chunks without eviction (Tide-NoEvict in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.full import growing, keep_everything


class TideNoEvictSchedule:
    """Separates the effect of the order from that of the eviction."""

    name = "tidekv-no-evict"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        return prefill_layers(decoder, token_ids, keep_everything(job, growing), chunk_size=job.chunk_size)


SCHEDULE = TideNoEvictSchedule()
