"""``headinfer``: the full KV in host memory, one KV head at a time on the device (HeadInfer's order)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.growing import OffloadedLayer
from tidekv_llm.costs.orders import chunk_major
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunk_major import run_chunk_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule

HEADS_PER_GROUP = 1


class HeadInferSchedule(Schedule):
    """Chunk-major; keys and values go to the host as they come and are fetched head by head, in decode too."""

    name = "headinfer"

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        slots = token_ids.shape[1] + task.reserve

        def make_layer(index: int) -> OffloadedLayer:
            return OffloadedLayer(slots, window=decoder.sliding_window(index), heads_per_group=HEADS_PER_GROUP)

        return run_chunk_major(decoder, token_ids, task, chunk_size=task.config.tokens_per_chunk, make_layer=make_layer)

    def cost(self, plan: Plan) -> Moments:
        slots, heads = plan.everything, HEADS_PER_GROUP
        return chunk_major(plan, plan.chunk_size, slots=slots, on_host=True, heads_at_once=heads)


SCHEDULE = HeadInferSchedule()
