"""Algorithm 1: layer-major chunked prefill with delayed eviction.

Every chunk of the prompt goes through one layer before the next layer begins. The active layer alone holds full
keys and values; when its last chunk is through, its layer end has seen the whole prompt, keeps K_l positions per
head, and the buffers serve the next layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidekv_llm.attention import Scratch
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
    cuts = (*boundaries, task.reused)
    chunks = [chunk for chunk in plan_chunks(token_ids.shape[1], chunk_size, cuts) if chunk.start >= task.reused]
    run = _LayerMajorRun(decoder, token_ids, task, layer_end, tuple(chunks))
    for index in range(decoder.num_layers):
        with decoder.ready(run.ready, index):
            run.fill(index)
        run.end(index)
    task.meter.set_component("bridge", run.bridge.nbytes)
    hidden = run.bridge.all() if task.all_outputs else run.bridge.last()
    return Construction(run.cache, hidden, layer_end.evidence)


class _LayerMajorRun:
    """One prompt between two layers: its bridge, the active layer and the cache so far."""

    def __init__(
        self, decoder: Decoder, token_ids: Tensor, task: PrefillTask, layer_end: LayerEnd, chunks: tuple[Chunk, ...]
    ) -> None:
        self.decoder, self.task, self.layer_end, self.chunks = decoder, task, layer_end, chunks
        batch, self.length = token_ids.shape
        self.bridge = make_bridge(task.config.bridge, batch, chunks, decoder)
        for chunk in chunks:
            self.bridge.write(chunk, decoder.embed(token_ids[:, chunk.start : chunk.stop]))
        self.ready = decoder.ready_layers()
        self.cache, self.scratch, self.work = CompressedCache(), Scratch(), WorkMeter(decoder, chunks)
        self.active = ActiveLayer(
            self.length,
            layer_end.window_size,
            decoder.attention(task.config.attention),
            self.scratch,
            layer_end.accumulator,
            slots_for(decoder) if task.reader is not None else 1,
        )
        self.feed = PrefixFeed(task.reader, task.reused, decoder, self.active) if task.reader is not None else None
        self.stored = task.writer.length if task.writer is not None else 0

    def fill(self, index: int) -> None:
        """Every chunk through layer ``index``; its full keys and values are in the active layer then."""
        self.active.begin(index)
        if self.feed is not None:
            self.feed.fill(index)
        steps, layers = self._steps(index), self.decoder.num_layers
        for number, (chunk, outputs_needed) in enumerate(steps, start=1):
            self.task.request.check_cancelled()
            self.active.outputs_needed = outputs_needed
            self._step(index, chunk, steps[number][0] if number < len(steps) else None)
            self.task.request.report(index + 1, layers, number, len(steps), self.work.finish(chunk))
        if self.feed is not None:
            self.feed.ahead(index + 1)

    def end(self, index: int) -> None:
        """The layer's end: what stays of it goes into the cache."""
        task, meter = self.task, self.task.meter
        with task.request.timed("compress"):
            full = self.active.full_layer(self.decoder.num_layers)
            self.cache.commit(self.layer_end.compress(full, self.decoder.sliding_window(index)))
        if task.writer is not None:
            task.writer.save(index, full.keys[:, :, : self.stored], full.values[:, :, : self.stored])
        meter.set_component("active_kv", self.active.nbytes)
        meter.set_component("ready_layer", self.ready.nbytes)
        meter.set_component("temporary", self.scratch.nbytes)
        meter.set_component("compressed_cache", self.cache.nbytes)

    def _steps(self, index: int) -> tuple[tuple[Chunk, bool], ...]:
        """The layer's chunks, each with whether its outputs are needed."""
        last = index == self.decoder.num_layers - 1 and not self.task.all_outputs
        return last_layer_chunks(self.chunks, self.active.window_size if last else self.length, uncut=self.stored)

    def _step(self, index: int, chunk: Chunk, ahead: Chunk | None) -> None:
        """One chunk through the layer, from its slot of the bridge and back; ``ahead`` is the next one."""
        decoder = self.decoder
        hidden = self.bridge.read(chunk, decoder.layer_device(index), ahead)
        positions = torch.arange(chunk.start, chunk.stop, device=hidden.device)
        tables = decoder.position_embeddings(hidden, positions, self.length - 1, index)
        try:
            output = decoder.run_layer(index, hidden, positions, tables, self.active, self.task.config.mlp_chunk_size)
        except KeysValuesOnly:  # the last layer, before the observation window
            return
        self.bridge.write(chunk, output)
