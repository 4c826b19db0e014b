"""``keydiff-online``: KeyDiff in its own order, evicting after every block of 128 tokens (the paper's control)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.compress.selectors import Selector
from tidekv_llm.compress.selectors.base import Scorer
from tidekv_llm.hf import Decoder
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.online import OnlineRule, prefill_online

BLOCK = 128  # tokens per step in KeyDiff's experiments


@dataclass(frozen=True)
class KeyDifference(Selector):
    """Keys that point away from the mean direction stay: -cos(k_i, mean of the unit keys), per KV head."""

    name: ClassVar[str] = "key-difference"

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        anchor = normalize(layer.keys.float(), dim=-1).mean(dim=2, keepdim=True)  # [B, Hkv, 1, D]
        anchor = normalize(anchor, dim=-1)

        def scores(start: int, stop: int) -> Tensor:
            keys = normalize(layer.keys[:, :, start:stop].float(), dim=-1)
            return -(keys * anchor).sum(dim=-1)

        return scores


class KeyDiffOnlineSchedule:
    """No window and no sinks, as in the original; the chunk size is KeyDiff's own, not the option's."""

    name = "keydiff-online"

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        config = job.compressor.config
        rule = OnlineRule(KeyDifference(), config.kept_tokens, 0, 0, config.score_block_size)
        return prefill_online(decoder, token_ids, job, rule=rule, chunk_size=BLOCK)


SCHEDULE = KeyDiffOnlineSchedule()
