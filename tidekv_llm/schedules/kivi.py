"""``kivi``: the whole prompt per layer, then 2-bit keys per channel and values per token (KIVI, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tidekv_llm.costs.orders import layer_major
from tidekv_llm.costs.plan import FLOAT32, Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import run_layer_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule
from tidekv_llm.schedules.compressing import compressing

BITS = 2
RESIDUAL = 128  # most recent positions in full precision, as in the original


class KiviSchedule(Schedule):
    """Prefill in full precision, layer by layer; only what decode reads is quantised, once.

    The original also packs decoded tokens, 128 at a time; answers here are shorter than that matters. Sliding-window
    layers keep their window in full precision.
    """

    name = "kivi"
    takes_chunk_size = False

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        length, config = token_ids.shape[1], task.config
        quantised = compressing(
            decoder,
            token_ids,
            task,
            kept_tokens=max(length, config.window_size + config.sinks),
            layer_budget="uniform",
            head_budget="uniform",
            layout="auto",
            kv_bits=BITS,
            kv_residual=RESIDUAL,
        )
        return run_layer_major(decoder, token_ids, task, quantised, chunk_size=length)

    def cost(self, plan: Plan) -> Moments:
        length = plan.prompt_length
        own = replace(plan, config=plan.config.replace(kv_bits=BITS, kv_residual=RESIDUAL))
        # The gathered layer is there until it is packed; one head at a time is copied to float32, shifted and scaled.
        head = length * plan.shape.head_dim * 3 * FLOAT32
        end = own.kv_bytes(length) + 2 * head
        return layer_major(own, length, plan.config.mlp_chunk_size, keeps=own.everything, layer_end_bytes=end)


SCHEDULE = KiviSchedule()
