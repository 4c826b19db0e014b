"""``keydiff-online``: KeyDiff in its own order, evicting after every block of 128 tokens (the paper's control)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.compress.selectors.keydiff import KeyDiff
from tidekv_llm.costs.plan import FLOAT32, Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule
from tidekv_llm.schedules.online import OnlineRule, evicting_cost, run_evicting

BLOCK = 128  # tokens per step in KeyDiff's experiments
PAPERS_KEYDIFF = KeyDiff(segment_length=None, share_heads=False)


class KeyDiffOnlineSchedule(Schedule):
    """No window and no sinks, as in the original; the chunk size is KeyDiff's own, not the option's."""

    name = "keydiff-online"
    takes_chunk_size = False

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        config = task.config
        rule = OnlineRule(PAPERS_KEYDIFF, config.kept_tokens, 0, 0, config.score_block_size)
        return run_evicting(decoder, token_ids, task, rule=rule, chunk_size=BLOCK)

    def cost(self, plan: Plan) -> Moments:
        chunk = min(BLOCK, plan.prompt_length)
        # float32 keys, their norms' quotient, and the product with the mean direction.
        keys = plan.kv_bytes(plan.config.kept_tokens + chunk) // 2 // plan.shape.element_bytes
        return evicting_cost(plan, chunk, 2 * FLOAT32 * keys)


SCHEDULE = KeyDiffOnlineSchedule()
