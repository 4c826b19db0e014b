"""``post-prefill``: the whole prompt per layer, then the same selector (the matched SnapKV, paper section 6.1)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job


class PostPrefillSchedule:
    """Layer-wise eviction after whole-prompt execution: activations are prompt-wide, not chunk-wide."""

    name = "post-prefill"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        return prefill_layers(decoder, token_ids, job, chunk_size=token_ids.shape[1])


SCHEDULE = PostPrefillSchedule()
