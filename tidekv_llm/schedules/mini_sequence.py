"""``mini-sequence``: whole-prompt attention, the MLP by mini-sequences, the full KV on the host (MOM's order)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.growing import GrowingLayer, OffloadedLayer
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.layer_major import prefill_layers
from tidekv_llm.schedules.base import Job
from tidekv_llm.schedules.full import keep_everything


def _offloaded(capacity: int, window: int | None) -> GrowingLayer:
    return OffloadedLayer(capacity, window=window)


class MiniSequenceSchedule:
    """Only the MLP's activations are cut to ``mlp_chunk_size`` tokens (default: the chunk size)."""

    name = "mini-sequence"
    reuses_prefix = False

    def prefill(self, decoder: Decoder, token_ids: Tensor, job: Job) -> tuple[CompressedCache, Tensor]:
        split = replace(job, mlp_chunk_size=job.mlp_chunk_size or job.chunk_size)
        return prefill_layers(decoder, token_ids, keep_everything(split, _offloaded), chunk_size=token_ids.shape[1])


SCHEDULE = MiniSequenceSchedule()
