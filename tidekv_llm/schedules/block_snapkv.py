"""``block-snapkv``: SnapKV after every chunk, with the chunk's own last queries (Block-SnapKV in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.compress.selectors import SnapKV
from tidekv_llm.hf import Decoder
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.online import OnlineRule, prefill_online


class BlockSnapKVSchedule:
    """The same selector, budget, window and sinks as ``tidekv``, applied before the prompt has been seen."""

    name = "block-snapkv"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        config = job.compressor.config
        rule = OnlineRule(
            selector=SnapKV.from_config(config),
            budget=config.kept_tokens,
            window_size=config.window_size,
            sinks=config.sinks,
            block_size=config.score_block_size,
        )
        return prefill_online(decoder, token_ids, job, rule=rule, chunk_size=job.chunk_size)


SCHEDULE = BlockSnapKVSchedule()
