"""``headinfer``: the full KV in host memory, one KV head at a time on the device (HeadInfer's order)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.growing import OffloadedLayer
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunk_major import prefill_chunks
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.full import capacity

HEADS_PER_GROUP = 1


class HeadInferSchedule:
    """Chunk-major; keys and values go to the host as they come and are fetched head by head, in decode too."""

    name = "headinfer"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        def make_layer(index: int) -> OffloadedLayer:
            window = decoder.sliding_window(index)
            return OffloadedLayer(capacity(token_ids, job), window=window, heads_per_group=HEADS_PER_GROUP)

        return prefill_chunks(decoder, token_ids, job, chunk_size=job.chunk_size, make_layer=make_layer)


SCHEDULE = HeadInferSchedule()
