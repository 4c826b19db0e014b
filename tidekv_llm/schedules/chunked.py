"""``chunked``: ordinary chunk-major prefill, no eviction (paper, Fig. 1b; Full-Chunked in Table 8)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.costs.orders import chunk_major
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunk_major import run_chunk_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule


class ChunkedSchedule(Schedule):
    """Activations are one chunk's, but every layer's full KV stays."""

    name = "chunked"

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        slots = token_ids.shape[1] + task.reserve

        def make_layer(index: int) -> GrowingLayer:
            return GrowingLayer(slots, window=decoder.sliding_window(index))

        return run_chunk_major(decoder, token_ids, task, chunk_size=task.config.tokens_per_chunk, make_layer=make_layer)

    def cost(self, plan: Plan) -> Moments:
        return chunk_major(plan, plan.chunk_size, slots=plan.everything)


SCHEDULE = ChunkedSchedule()
