"""``post-prefill``: the whole prompt per layer, then the same selector (the matched SnapKV, paper section 6.1)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job


class PostPrefillSchedule:
    """Layer-wise eviction after whole-prompt execution: activations are prompt-wide, not chunk-wide.

    Like the paper's control (section 4.3) it also scores densely: one block of S keys, a workspace of
    B * Hq * W * S scores, instead of ``score_block_size`` keys at a time.
    """

    name = "post-prefill"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        length = token_ids.shape[1]
        dense = replace(job.compressor, config=job.compressor.config.replace(score_block_size=length))
        result = prefill_layers(decoder, token_ids, replace(job, compressor=dense), chunk_size=length)
        job.compressor.evidence = dense.evidence
        return result


SCHEDULE = PostPrefillSchedule()
