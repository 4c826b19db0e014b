"""The ordinary order: every chunk goes through all layers before the next chunk begins (paper, Fig. 1b and c)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidekv_llm.attention import Scratch
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunks import plan_chunks
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.prefill.work import WorkMeter


def run_chunk_major(
    decoder: Decoder,
    token_ids: Tensor,
    task: PrefillTask,
    *,
    chunk_size: int,
    make_layer: Callable[[int], GrowingLayer],
) -> Construction:
    """Build a cache chunk by chunk.

    Args:
        decoder: the model.
        token_ids: int64 [B, S].
        task: options, request and meter.
        chunk_size: C, tokens per step.
        make_layer: storage of layer ``index``, empty.

    Raises:
        Cancelled: within one chunk step of the caller's wish.
    """
    chunks = plan_chunks(token_ids.shape[1], chunk_size, task.boundaries)
    cache, scratch, work = CompressedCache(), Scratch(), WorkMeter(decoder, chunks)
    attention, mlp_chunk_size = decoder.attention(task.config.attention), task.config.mlp_chunk_size
    layers, ready = [make_layer(index) for index in range(decoder.num_layers)], decoder.ready_layers()
    for layer in layers:
        layer.bind(attention, scratch)
        cache.commit(layer)
    outputs: Tensor | None = None
    for number, chunk in enumerate(chunks, start=1):
        hidden = decoder.embed(token_ids[:, chunk.start : chunk.stop])
        positions = torch.arange(chunk.start, chunk.stop, device=hidden.device)
        tables: dict[str, object] = {}
        for index, layer in enumerate(layers):
            task.request.check_cancelled()
            kind = decoder.layer_types[index]
            with decoder.ready(ready, index):
                if kind not in tables:
                    tables[kind] = decoder.position_embeddings(hidden, positions, token_ids.shape[1] - 1, index)
                hidden = decoder.run_layer(index, hidden, positions, tables[kind], layer, mlp_chunk_size)
            with task.request.timed("compress"):
                layer.end_chunk()
            task.request.report(index + 1, len(layers), number, len(chunks), work.finish(chunk))
        if task.all_outputs:
            outputs = _collect(outputs, hidden, chunk.start, token_ids.shape[1])
    for layer in layers:
        layer.seal()
    task.meter.set_component("ready_layer", ready.nbytes)
    task.meter.set_component("temporary", scratch.nbytes)
    task.meter.set_component("compressed_cache", cache.nbytes)
    return Construction(cache, hidden[:, -1:].clone() if outputs is None else outputs)


def _collect(outputs: Tensor | None, hidden: Tensor, start: int, length: int) -> Tensor:
    if outputs is None:
        outputs = hidden.new_empty((hidden.shape[0], length, hidden.shape[2]))
    outputs[:, start : start + hidden.shape[1]] = hidden
    return outputs
