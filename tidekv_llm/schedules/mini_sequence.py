"""``mini-sequence``: whole-prompt attention, the MLP by mini-sequences, the full KV on the host (MOM's order)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.growing import OffloadedLayer
from tidekv_llm.compress.keep_everything import KeepEverything
from tidekv_llm.costs.orders import layer_major
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import run_layer_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule


class MiniSequenceSchedule(Schedule):
    """Only the MLP's activations are cut to ``mlp_chunk_size`` tokens (default: the chunk size)."""

    name = "mini-sequence"

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        config = task.config
        split = task.with_options(mlp_chunk_size=config.mlp_chunk_size or config.tokens_per_chunk)
        offloaded = KeepEverything(config.window_size, task.reserve, OffloadedLayer)
        return run_layer_major(decoder, token_ids, split, offloaded, chunk_size=token_ids.shape[1])

    def cost(self, plan: Plan) -> Moments:
        split = plan.config.mlp_chunk_size or plan.chunk_size
        return layer_major(plan, plan.prompt_length, split, keeps=plan.everything, layer_end_bytes=0, on_host=True)


SCHEDULE = MiniSequenceSchedule()
