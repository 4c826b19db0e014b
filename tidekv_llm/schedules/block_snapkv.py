"""``block-snapkv``: SnapKV after every chunk, with the chunk's own last queries (Block-SnapKV in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.compress.selectors import SnapKV
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule
from tidekv_llm.schedules.online import OnlineRule, block_cost, run_evicting


class BlockSnapKVSchedule(Schedule):
    """The same selector, budget, window and sinks as ``tidekv``, applied before the prompt has been seen."""

    name = "block-snapkv"

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        config = task.config
        rule = OnlineRule(
            selector=SnapKV.from_config(config),
            budget=config.kept_tokens,
            window_size=config.window_size,
            sinks=config.sinks,
            block_size=config.score_block_size,
        )
        return run_evicting(decoder, token_ids, task, rule=rule, chunk_size=task.config.tokens_per_chunk)

    def cost(self, plan: Plan) -> Moments:
        return block_cost(plan)


SCHEDULE = BlockSnapKVSchedule()
