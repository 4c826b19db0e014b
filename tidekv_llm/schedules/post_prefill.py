"""``post-prefill``: the whole prompt per layer, then the same selector (the matched SnapKV, paper section 6.1)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.costs.orders import layer_major
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import run_layer_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule
from tidekv_llm.schedules.compressing import compressing


class PostPrefillSchedule(Schedule):
    """Layer-wise eviction after whole-prompt execution: activations are prompt-wide, not chunk-wide.

    Like the paper's control (section 4.3) it also scores densely: one block of S keys, a workspace of
    B * Hq * W * S scores, instead of ``score_block_size`` keys at a time.
    """

    name = "post-prefill"
    takes_chunk_size = False

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        length = token_ids.shape[1]
        dense = compressing(decoder, token_ids, task, score_block_size=length)
        return run_layer_major(decoder, token_ids, task, dense, chunk_size=length)

    def cost(self, plan: Plan) -> Moments:
        length = plan.prompt_length
        return layer_major(plan, length, plan.config.mlp_chunk_size, block=length)


SCHEDULE = PostPrefillSchedule()
