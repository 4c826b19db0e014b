"""Algorithm 1: layer-major chunked prefill with delayed eviction.

Every chunk of the prompt goes through one layer before the next layer begins. The active layer alone holds full
keys and values; when its last chunk is through, its layer end has seen the whole prompt, keeps K_l positions per
head, and the buffers serve the next layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionDispatch, Scratch
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.cache.full_layer import LayerEnd
from tidekv_llm.hf import Decoder, KeysValuesOnly
from tidekv_llm.prefill.active_layer import ActiveLayer
from tidekv_llm.prefill.chunks import Chunk, last_layer_chunks, plan_chunks
from tidekv_llm.prefill.hidden_bridge import make_bridge
from tidekv_llm.prefill.prefix_feed import PrefixFeed, slots_for
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.prefill.work import WorkMeter


def run_layer_major(
    decoder: Decoder,
    token_ids: Tensor,
    task: PrefillTask,
    layer_end: LayerEnd,
    *,
    chunk_size: int,
    boundaries: tuple[int, ...] = (),
) -> Construction:
    """Build the compressed cache of a prompt.

    Args:
        decoder: the model.
        token_ids: int64 [B, S].
        task: options, request and meter; a prefix to start from, or one to keep.
        layer_end: what becomes of every finished layer.
        chunk_size: C, tokens per step.
        boundaries: positions where a chunk must end.

    Raises:
        Cancelled: within one chunk step of the caller's wish.
    """
    prompt_length = token_ids.shape[1]
    cuts = (*boundaries, task.reused)
    chunks = tuple(chunk for chunk in plan_chunks(prompt_length, chunk_size, cuts) if chunk.start >= task.reused)
    bridge = make_bridge(task.config.bridge, token_ids.shape[0], chunks, decoder)
    for chunk in chunks:
        bridge.write(chunk, decoder.embed(token_ids[:, chunk.start : chunk.stop]))
    scratch = Scratch()
    slots = slots_for(decoder) if task.reader is not None else 1
    attention = AttentionDispatch(task.config.attention)
    active = ActiveLayer(prompt_length, layer_end.window_size, attention, scratch, layer_end.accumulator, slots)
    feed = PrefixFeed(task.reader, task.reused, decoder, active) if task.reader is not None else None
    cache, work = CompressedCache(), WorkMeter(decoder, chunks)
    stored = task.writer.length if task.writer is not None else 0
    for index in range(decoder.num_layers):
        active.begin(index)
        if feed is not None:
            feed.fill(index)
        skip = index == decoder.num_layers - 1 and not task.all_outputs
        steps = last_layer_chunks(chunks, active.window_size if skip else prompt_length, uncut=stored)
        for number, (chunk, outputs_needed) in enumerate(steps, start=1):
            task.request.check_cancelled()
            active.outputs_needed = outputs_needed
            ahead = steps[number][0] if number < len(steps) else None
            hidden = bridge.read(chunk, decoder.layer_device(index), ahead)
            output = _run_chunk(decoder, index, chunk, prompt_length, hidden, active, task.config.mlp_chunk_size)
            if output is not None:
                bridge.write(chunk, output)
            del hidden, output
            task.request.report(index + 1, decoder.num_layers, number, len(steps), work.finish(chunk))
        if feed is not None:
            feed.ahead(index + 1)
        with task.request.timed("compress"):
            full = active.full_layer(decoder.num_layers)
            cache.commit(layer_end.compress(full, decoder.sliding_window(index)))
        if task.writer is not None:
            task.writer.save(index, full.keys[:, :, :stored], full.values[:, :, :stored])
        task.meter.set_component("active_kv", active.nbytes)
        task.meter.set_component("temporary", scratch.nbytes)
        task.meter.set_component("compressed_cache", cache.nbytes)
    task.meter.set_component("bridge", bridge.nbytes)
    return Construction(cache, bridge.all() if task.all_outputs else bridge.last(), layer_end.evidence)


def _run_chunk(
    decoder: Decoder,
    index: int,
    chunk: Chunk,
    prompt_length: int,
    hidden: Tensor,
    active: ActiveLayer,
    mlp_chunk_size: int,
) -> Tensor | None:
    """The layer's output [B, C, d_model], None where only keys and values were needed."""
    positions = torch.arange(chunk.start, chunk.stop, device=hidden.device)
    tables = decoder.position_embeddings(hidden, positions, prompt_length - 1, index)
    try:
        return decoder.run_layer(index, hidden, positions, tables, active, mlp_chunk_size)
    except KeysValuesOnly:  # the last layer, before the observation window
        return None
