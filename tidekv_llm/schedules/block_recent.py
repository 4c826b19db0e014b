"""``block-recent``: only the newest positions stay after every chunk (Block-Recent in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.compress.selectors import Recent
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule
from tidekv_llm.schedules.online import OnlineRule, block_cost, run_evicting


class BlockRecentSchedule(Schedule):
    """Recent-token eviction without sinks, as its name says: the first positions go with the first chunks.

    That is what drives its drift so high (paper: cosine 0.439, top-1 agreement 0): attention loses the positions
    that collect what no other position wants. With sinks it would be StreamingLLM.
    """

    name = "block-recent"

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        config = task.config
        rule = OnlineRule(Recent(), config.kept_tokens, 1, 0, config.score_block_size)
        return run_evicting(decoder, token_ids, task, rule=rule, chunk_size=task.config.tokens_per_chunk)

    def cost(self, plan: Plan) -> Moments:
        return block_cost(plan)


SCHEDULE = BlockRecentSchedule()
