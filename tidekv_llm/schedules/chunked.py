"""``chunked``: ordinary chunk-major prefill, no eviction (paper, Fig. 1b; Full-Chunked in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunk_major import prefill_chunks
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.full import capacity, growing


class ChunkedSchedule:
    """Activations are one chunk's, but every layer's full KV stays."""

    name = "chunked"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        return prefill_chunks(
            decoder,
            token_ids,
            job,
            chunk_size=job.chunk_size,
            make_layer=lambda index: growing(capacity(token_ids, job), decoder.sliding_window(index)),
        )


SCHEDULE = ChunkedSchedule()
