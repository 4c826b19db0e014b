"""``tidekv``: layer-major, chunk by chunk, evicting at each layer's end (paper, Algorithm 1)."""

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


class TideSchedule(Schedule):
    """The paper's schedule: its highest memory is one layer's KV, the bridge and one chunk's activations."""

    name = "tidekv"
    reuses_prefix = True

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        layer_end, chunk_size = compressing(decoder, token_ids, task), task.config.tokens_per_chunk
        return run_layer_major(decoder, token_ids, task, layer_end, chunk_size=chunk_size, boundaries=task.boundaries)

    def cost(self, plan: Plan) -> Moments:
        return layer_major(plan, plan.chunk_size, plan.config.mlp_chunk_size)


SCHEDULE = TideSchedule()
