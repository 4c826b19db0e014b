"""The compressor: a selector, budgets and a cache layout behind one call per finished layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tidekv_llm.cache.flattened import FlattenedLayer
from tidekv_llm.cache.full_layer import Accumulator, FullLayer
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.cache.rectangular import RectangularLayer
from tidekv_llm.compress.budgets import pyramid_layer_budgets, uniform_layer_budgets
from tidekv_llm.compress.cascade import Cascade
from tidekv_llm.compress.layer_end import HeadKept, Kept, select_per_head, select_positions
from tidekv_llm.compress.selectors import Selector, make_selector
from tidekv_llm.config import PrefillConfig
from tidekv_llm.passages import Passages


@dataclass
class Compressor:
    """One request's layer end (:class:`~tidekv_llm.cache.full_layer.LayerEnd`).

    Args:
        config: budgets, window, sinks and block size.
        num_layers: layers of the model.
        prompt_length: S.
        reserve: slots for decoded tokens in every layer's storage.
        full_layers: indices of the layers with full attention, default all; they share the budget.
        passages: lines and sentences of the prompt, where its text is known.
    """

    config: PrefillConfig
    num_layers: int
    prompt_length: int
    reserve: int = 0
    full_layers: Sequence[int] | None = None
    passages: Passages | None = None
    selector: Selector = field(init=False)
    evidence: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        config, self.selector = self.config, make_selector(self.config)
        full = tuple(range(self.num_layers)) if self.full_layers is None else tuple(self.full_layers)
        self._last_full = full[-1] if full else -1
        self._budgets = dict(zip(full, _layer_budgets(config, len(full), self.prompt_length), strict=True))
        self._cascade: Cascade | None = None
        if config.layer_budget == "cake" and config.kept_tokens < self.prompt_length:
            mandatory = min(config.window_size + config.sinks, self.prompt_length)
            self._cascade = Cascade(len(full) * config.kept_tokens, mandatory)
        self._leader: _Leader | None = None

    @property
    def window_size(self) -> int:
        """W: how many of the last queries the scheduler keeps."""
        return self.config.window_size

    def accumulator(self) -> Accumulator | None:
        """A fresh accumulator for the next layer, if the selector wants to see every chunk's queries."""
        if self.config.kept_tokens >= self.prompt_length:
            return None
        return self.selector.accumulator(self.prompt_length)

    def compress(self, layer: FullLayer, window: int | None) -> StoredLayer:
        """Select, gather and store what stays of ``layer``; ``window`` is its sliding window, if it has one."""
        if window is not None:
            kept_last = _last_positions(layer, window)
            return RectangularLayer(layer.keys, layer.values, kept_last, reserve=self.reserve, window=window)
        layer, cascade = replace(layer.observed_by(self.window_size), passages=self.passages), self._cascade
        block = self.config.score_block_size
        budget = self._budgets[layer.index] if cascade is None else cascade.make_room(layer, block)
        kept = self._select(layer, budget)
        stored = self._store(layer, kept)
        final = [(stored, kept)]
        if cascade is not None:  # every budget is final with the last layer's
            cascade.add(stored, kept)
            final = cascade.layers if layer.index == self._last_full else []
        for each in final:
            self._finish(*each)
        return stored

    def _select(self, layer: FullLayer, budget: int) -> Kept | HeadKept:
        reuse = self.selector.reuse_layers
        leader = self._leader
        if leader is not None and layer.index // reuse == leader.index // reuse and budget <= leader.budget:
            return leader.kept if budget == leader.budget else leader.kept.cut(budget)
        kept = self._choose(layer, budget)
        if reuse > 1:
            self._leader = _Leader(layer.index, budget, kept)
        return kept

    def _choose(self, layer: FullLayer, budget: int) -> Kept | HeadKept:
        config, selector = self.config, self.selector
        sizes = {"window_size": config.window_size, "sinks": config.sinks, "block_size": config.score_block_size}
        if config.head_budget == "ada" and config.kept_tokens < layer.prompt_length:
            return select_per_head(layer, selector, budget, floor_alpha=config.floor_alpha, **sizes)
        return select_positions(layer, selector, budget, rank_all=self._cascade is not None, **sizes)

    def _store(self, layer: FullLayer, kept: Kept | HeadKept) -> StoredLayer:
        ragged = isinstance(kept, HeadKept) or self.config.kv_bits < 16 or self.config.layout == "flattened"
        if isinstance(kept, Kept) and not ragged:
            return RectangularLayer(layer.keys, layer.values, kept.indices, reserve=self.reserve)
        return FlattenedLayer(layer.keys, layer.values, kept.heads(), reserve=self.reserve)

    def _finish(self, stored: StoredLayer, kept: Kept | HeadKept) -> None:
        """What is left to do once a layer's budget is final."""
        self._add_evidence(kept)
        if self.config.kv_bits < 16:
            stored.quantise(self.config.kv_bits, residual=self.config.kv_residual)

    def _add_evidence(self, kept: Kept | HeadKept) -> None:
        """Sum, per prompt position, the scores it was kept for: where the question looked."""
        positions, scores = kept.evidence()
        if not self.selector.query_aware or scores.numel() == 0:
            return
        if self.evidence is None:
            self.evidence = torch.zeros(self.prompt_length, dtype=torch.float32)
        self.evidence.index_add_(0, positions.cpu(), scores.cpu())


@dataclass(frozen=True, slots=True)
class _Leader:
    """The layer whose choice its neighbours reuse."""

    index: int
    budget: int
    kept: Kept | HeadKept


def _layer_budgets(config: PrefillConfig, num_layers: int, prompt_length: int) -> list[int]:
    """Budgets before the first layer; CAKE's own follow from what it sees."""
    if config.layer_budget != "pyramid" or num_layers == 0:
        return uniform_layer_budgets(config.kept_tokens, num_layers)
    return pyramid_layer_budgets(
        config.kept_tokens,
        num_layers,
        prompt_length=prompt_length,
        window_size=config.window_size,
        sinks=config.sinks,
        beta=config.beta,
    )


def _last_positions(layer: FullLayer, window: int) -> Tensor:
    """A sliding-window layer keeps exactly its window: selection is for full attention only."""
    first = max(0, layer.prompt_length - window)
    positions = torch.arange(first, layer.prompt_length, device=layer.keys.device)
    return positions.expand(layer.keys.shape[0], layer.kv_heads, -1)
