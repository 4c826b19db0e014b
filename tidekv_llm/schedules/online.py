"""Immediate eviction: what the block controls and KeyDiff's own order have in common (paper, Fig. 1c)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionParams
from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.cache.growing import GrowingLayer
from tidekv_llm.compress.layer_end import select_positions
from tidekv_llm.compress.selectors import Recent, Selector
from tidekv_llm.costs.layer_step import scoring_bytes
from tidekv_llm.costs.orders import chunk_major
from tidekv_llm.costs.plan import INT64, Moments, Plan
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.chunk_major import run_chunk_major
from tidekv_llm.prefill.result import Construction
from tidekv_llm.prefill.task import PrefillTask


@dataclass(frozen=True, slots=True)
class OnlineRule:
    """How a layer evicts after each chunk.

    Attributes:
        selector: scores what is stored; it sees the kept history and the chunk, never the rest of the prompt.
        budget: positions that stay after each chunk.
        window_size: the chunk's last positions, whose queries score and which always stay.
        sinks: first positions that always stay.
        block_size: keys scored at once.
    """

    selector: Selector
    budget: int
    window_size: int
    sinks: int
    block_size: int


class OnlineLayer(GrowingLayer):
    """Keeps ``rule.budget`` positions after every chunk; the next chunk sees only those and itself.

    The kept ones come before the chunk in storage and in time, so causal attention aligned to the bottom right stays
    right, and rotary positions are the true ones, in the keys already.

    Args:
        index: layer number.
        num_layers: layers of the model.
        rule: how to evict.
        capacity: slots to allocate: budget plus one chunk.
        window: sliding window in tokens, for layers that have one.
    """

    def __init__(
        self, index: int, num_layers: int, rule: OnlineRule, *, capacity: int, window: int | None = None
    ) -> None:
        super().__init__(capacity, window=window)
        self.index, self.num_layers, self.rule = index, num_layers, rule
        self._sealed = False
        self._slots: Tensor | None = None  # true positions int64 [B, Hkv, slots in use]
        self._seen: tuple[Tensor, Tensor | None, AttentionParams] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self._sealed:
            shape = (*key_states.shape[:2], key_states.shape[2])
            new = torch.arange(self.logical, self.logical + shape[2], device=key_states.device).expand(shape)
            self._slots = new if self._slots is None else torch.cat((self._slots, new), dim=-1)
        return super().update(key_states, value_states)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        if self._sealed:
            return super().attend(query, key, value, params)
        assert self._attention is not None and self._scratch is not None
        rows = min(self.rule.window_size, query.shape[2])
        out, lse = self._attention.attend(query, key, value, params, self._scratch, lse_rows=rows)
        # A copy: a view would keep all the chunk's queries alive through the MLP.
        self._seen = query[:, :, query.shape[2] - rows :].clone(), lse, params
        return out

    def end_chunk(self) -> None:
        """Evict down to the budget, in place."""
        assert self._seen is not None and self._slots is not None
        (queries, lse, params), self._seen = self._seen, None
        rule = self.rule
        if self._physical <= rule.budget:
            return
        layer = FullLayer(
            index=self.index,
            num_layers=self.num_layers,
            keys=self.keys[:, :, : self._physical],
            values=self.values[:, :, : self._physical],
            queries=queries,
            lse=lse,
            params=params,
        )
        kept = select_positions(
            layer,
            rule.selector,
            rule.budget,
            window_size=queries.shape[2] if rule.window_size else 0,
            sinks=rule.sinks,
            block_size=rule.block_size,
        ).indices
        self._slots = self._slots.gather(-1, kept)
        self._physical = kept.shape[-1]
        for storage in (self.keys, self.values):
            rows = kept.unsqueeze(-1).expand(*kept.shape, storage.shape[-1])
            storage[:, :, : self._physical] = storage.gather(2, rows)

    def seal(self) -> None:
        super().seal()
        self._sealed = True

    def _stored_positions(self) -> Tensor:
        assert self._slots is not None
        return self._slots


def run_evicting(
    decoder: Decoder, token_ids: Tensor, task: PrefillTask, *, rule: OnlineRule, chunk_size: int
) -> Construction:
    """Chunk-major with eviction after every chunk; sliding-window layers keep exactly their window."""

    def make_layer(index: int) -> OnlineLayer:
        window = decoder.sliding_window(index)
        own = rule if window is None else OnlineRule(Recent(), window, 1, 0, rule.block_size)
        room = own.budget + max(min(chunk_size, token_ids.shape[1]), task.reserve)
        return OnlineLayer(index, decoder.num_layers, own, capacity=room, window=window)

    return run_chunk_major(decoder, token_ids, task, chunk_size=chunk_size, make_layer=make_layer)


def evicting_cost(plan: Plan, chunk: int, score_bytes: int) -> Moments:
    """Budget plus one chunk of slots per layer; an eviction copies one of keys or values aside."""
    kept = min(plan.config.kept_tokens, plan.prompt_length)
    slots = min(kept + chunk, plan.prompt_length)
    aside = plan.kv_bytes(kept) // 2 + plan.batch * plan.shape.num_kv_heads * kept * INT64
    evict = max(aside, score_bytes) if slots > kept else 0
    return chunk_major(plan, chunk, slots=lambda layer: slots, evict_bytes=evict, position_size=INT64)


def block_cost(plan: Plan) -> Moments:
    """Of a rule that evicts after every chunk of the prompt."""
    history = plan.config.kept_tokens + plan.chunk_size
    scores = scoring_bytes(plan, plan.config.score_block_size, plan.config.kept_tokens, history)
    return evicting_cost(plan, plan.chunk_size, scores)
