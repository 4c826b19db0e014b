"""``keydiff-online``: KeyDiff in its own order, evicting after every block of 128 tokens (the paper's control)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.compress.selectors.keydiff import KeyDiff
from tidekv_llm.hf import Decoder
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.online import OnlineRule, prefill_online

BLOCK = 128  # tokens per step in KeyDiff's experiments
PAPERS_KEYDIFF = KeyDiff(segment_length=None, share_heads=False)


class KeyDiffOnlineSchedule:
    """No window and no sinks, as in the original; the chunk size is KeyDiff's own, not the option's."""

    name = "keydiff-online"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        config = job.compressor.config
        rule = OnlineRule(PAPERS_KEYDIFF, config.kept_tokens, 0, 0, config.score_block_size)
        return prefill_online(decoder, token_ids, job, rule=rule, chunk_size=BLOCK)


SCHEDULE = KeyDiffOnlineSchedule()
