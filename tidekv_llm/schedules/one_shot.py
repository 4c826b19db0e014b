"""``one-shot``: the model's own forward over the whole prompt, full KV (the reference of Table 8, Fig. 1a)."""

from __future__ import annotations

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.full import capacity, growing


class OneShotSchedule:
    """Not our layer path but transformers' own, with the model's own attention: what we are compared with."""

    name = "one-shot"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        cache = CompressedCache()
        layers = [growing(capacity(token_ids, job), decoder.sliding_window(i)) for i in range(decoder.num_layers)]
        for layer in layers:
            cache.commit(layer)
        job.request.check_cancelled()
        hidden = decoder.whole_forward(token_ids, cache)
        for layer in layers:
            layer.seal()
        job.meter.set_component("compressed_cache", cache.nbytes)
        job.request.report(decoder.num_layers, decoder.num_layers, 1, 1, 1.0)
        return cache, hidden if job.all_outputs else hidden[:, -1:].clone()


SCHEDULE = OneShotSchedule()
