"""``block-recent``: only the newest positions stay after every chunk (Block-Recent in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.compress.selectors import Recent
from tidekv_llm.hf import Decoder
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.online import OnlineRule, prefill_online


class BlockRecentSchedule:
    """Recent-token eviction without sinks, as its name says: the first positions go with the first chunks.

    That is what drives its drift so high (paper: cosine 0.439, top-1 agreement 0): attention loses the positions
    that collect what no other position wants. With sinks it would be StreamingLLM.
    """

    name = "block-recent"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        config = job.compressor.config
        rule = OnlineRule(Recent(), config.kept_tokens, 1, 0, config.score_block_size)
        return prefill_online(decoder, token_ids, job, rule=rule, chunk_size=job.chunk_size)


SCHEDULE = BlockRecentSchedule()
