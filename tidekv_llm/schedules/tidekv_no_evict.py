"""``tidekv-no-evict``: layer-major chunks without eviction (Tide-NoEvict in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.compress.keep_everything import KeepEverything
from tidekv_llm.costs.orders import layer_major
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import run_layer_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule


class TideNoEvictSchedule(Schedule):
    """Separates the effect of the order from that of the eviction."""

    name = "tidekv-no-evict"

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        everything = KeepEverything(task.config.window_size, task.reserve)
        return run_layer_major(decoder, token_ids, task, everything, chunk_size=task.config.tokens_per_chunk)

    def cost(self, plan: Plan) -> Moments:
        split = plan.config.mlp_chunk_size
        return layer_major(plan, plan.chunk_size, split, keeps=plan.everything, layer_end_bytes=0)


SCHEDULE = TideNoEvictSchedule()
