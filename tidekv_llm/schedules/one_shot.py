"""``one-shot``: the model's own forward over the whole prompt, full KV (the reference of Table 8, Fig. 1a)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.schedules.base import Schedule


class OneShotSchedule(Schedule):
    """Not our layer path but transformers' own, with the model's own attention: what we are compared with."""

    name = "one-shot"

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


SCHEDULE = OneShotSchedule()
