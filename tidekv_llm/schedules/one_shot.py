"""``one-shot``: the model's own forward over the whole prompt, full KV (the reference of Table 8, Fig. 1a)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.costs.layer_step import LayerStep
from tidekv_llm.costs.plan import Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule


class OneShotSchedule(Schedule):
    """Not our layer path but transformers' own, with the model's own attention: what we are compared with."""

    name = "one-shot"
    takes_chunk_size = False

    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        cache = CompressedCache()
        slots = token_ids.shape[1] + task.reserve
        layers = [GrowingLayer(slots, window=decoder.sliding_window(index)) for index in range(decoder.num_layers)]
        for layer in layers:
            cache.commit(layer)
        task.request.check_cancelled()
        hidden = decoder.whole_forward(token_ids, cache)
        for layer in layers:
            layer.seal()
        task.meter.set_component("compressed_cache", cache.nbytes)
        task.request.report(decoder.num_layers, decoder.num_layers, 1, 1, 1.0)
        return Construction(cache, hidden if task.all_outputs else hidden[:, -1:].clone())

    def cost(self, plan: Plan) -> Moments:
        """Transformers' own forward: embeddings, the layer's input and all layers' KV are alive together."""
        plan = replace(plan, shape=replace(plan.shape, computed_bytes=0))  # the model's own forward converts nothing
        shape, length = plan.shape, plan.prompt_length
        step = LayerStep(plan, length, length, length, repeats_kv=plan.scratch and shape.num_kv_heads < shape.num_heads)
        steady = plan.held(shape.num_layers, plan.everything, position_size=0)
        forward = {"bridge": 2 * plan.hidden_bytes(length), "activations": step.activation_bytes()}
        return Moments(({**steady, **forward},), steady)


SCHEDULE = OneShotSchedule()
