"""LayerEndCompress (paper, Algorithm 2): choose the positions of a finished layer that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.budgets import ada_head_budgets
from tidekv_llm.compress.scoring import StreamingTopK, blocks, pack
from tidekv_llm.compress.selectors import Selector
from tidekv_llm.compress.selectors.base import checked_scores
from tidekv_llm.errors import BudgetError, SelectorError

# Positions int64 [n], ascending, and the float32 scores [n] they have.
Ranked = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Kept:
    """Positions a layer keeps, equally many per head.

    Attributes:
        indices: int64 [B, Hkv, K], ascending.
        scored: int64 [B, Hkv, k], those of them that won by their score (K minus the mandatory ones).
        scores: float32 [B, Hkv, k], the scores they won by.
    """

    indices: Tensor
    scored: Tensor
    scores: Tensor

    def heads(self) -> list[Tensor]:
        """Kept indices of each head, row by row: B * Hkv tensors int64 [K]."""
        return list(self.indices.flatten(0, 1))

    def evidence(self) -> tuple[Tensor, Tensor]:
        """Positions and scores [n] of batch row 0 over all heads, of what won by its score."""
        return self.scored[0].flatten(), self.scores[0].flatten()

    def cut(self, budget: int) -> Kept:
        """The choice a smaller budget would have made."""
        dropped = self.indices.shape[-1] - budget
        count = self.scored.shape[-1] - dropped
        if dropped <= 0 or count < 0:
            return self
        # Ascending positions make their order the tie break.
        best = pack(self.scores, 0).topk(count, dim=-1, sorted=False).values & 0xFFFFFFFF
        order = best.sort(dim=-1).values
        scored, scores = self.scored.gather(-1, order), self.scores.gather(-1, order)
        first = int(torch.searchsorted(self.indices[0, 0], self.scored[0, 0, :1]))
        last = self.indices[..., first + self.scored.shape[-1] :]
        return Kept(torch.cat((self.indices[..., :first], scored, last), dim=-1), scored, scores)


@dataclass(frozen=True, slots=True)
class HeadKept:
    """Positions a layer keeps, each head with a budget of its own.

    Attributes:
        candidates: per row and head, (positions int64 [n] ascending, scores float32 [n]): a head's best ones,
            enough for this budget and every smaller one.
        counts: per row and head, how many of the candidates are kept.
        first: end of the mandatory range [0, first).
        last: start of the mandatory range [last, prompt_length).
        prompt_length: S.
        kv_heads: Hkv.
        floor_alpha: the part of a budget that is shared out evenly.
    """

    candidates: tuple[Ranked, ...]
    counts: tuple[int, ...]
    first: int
    last: int
    prompt_length: int
    kv_heads: int
    floor_alpha: float

    def heads(self) -> list[Tensor]:
        """Kept indices of each head, row by row: B * Hkv ascending tensors int64 [K_h]."""
        device = self.candidates[0][0].device
        sinks = torch.arange(self.first, device=device)
        window = torch.arange(self.last, self.prompt_length, device=device)
        return [torch.cat((sinks, positions, window)) for positions, _ in self._chosen()]

    def evidence(self) -> tuple[Tensor, Tensor]:
        """Positions and scores [n] of batch row 0 over all heads, of what won by its score."""
        positions, scores = zip(*self._chosen()[: self.kv_heads], strict=True)
        return torch.cat(positions), torch.cat(scores)

    def cut(self, budget: int) -> HeadKept:
        """The choice a smaller budget would have made, no head growing."""
        mean = budget - self.first - (self.prompt_length - self.last)
        counts: list[int] = []
        for row in range(0, len(self.candidates), self.kv_heads):
            heads, caps = slice(row, row + self.kv_heads), self.counts[row : row + self.kv_heads]
            shares = _shares(self.candidates[heads], mean)
            counts += ada_head_budgets(shares, mean, self.floor_alpha, caps)
        return replace(self, counts=tuple(counts))

    def _chosen(self) -> list[Ranked]:
        return [_best(*head, count) for head, count in zip(self.candidates, self.counts, strict=True)]


def _best(positions: Tensor, scores: Tensor, count: int) -> Ranked:
    """The ``count`` highest of a head's candidates, positions ascending."""
    if count == positions.shape[0]:
        return positions, scores
    order = (pack(scores, 0).topk(count).values & 0xFFFFFFFF).sort().values
    return positions[order], scores[order]


def _shares(heads: tuple[Ranked, ...], budget: int) -> list[int]:
    """How many of the ``heads * budget`` best candidates lie in each head; a tie goes to the later position."""
    owner = torch.cat([torch.full_like(positions, head) for head, (positions, _) in enumerate(heads)])
    positions = torch.cat([positions for positions, _ in heads]) * len(heads) + owner
    scores = torch.cat([scores for _, scores in heads])
    order = positions.argsort()
    winners = pack(scores[order], 0).topk(len(heads) * budget).values & 0xFFFFFFFF
    return owner[order][winners].bincount(minlength=len(heads)).tolist()


def mandatory_ranges(prompt_length: int, window_size: int, sinks: int) -> tuple[int, int]:
    """Ends of the two mandatory ranges: ``[0, a)`` and ``[b, prompt_length)`` are always kept.

    Example: 100 tokens, window 16, 4 sinks gives (4, 84); a prompt shorter than both gives everything.
    """
    recent_start = max(0, prompt_length - window_size)
    return min(sinks, recent_start), recent_start


def select_positions(
    layer: FullLayer,
    selector: Selector,
    budget: int,
    *,
    window_size: int,
    sinks: int,
    block_size: int,
    rank_all: bool = False,
) -> Kept:
    """The K = min(budget, S) positions per KV head with the highest scores, mandatory ones included.

    Args:
        layer: the finished layer.
        selector: who scores.
        budget: K_l, the mandatory positions counted inside it.
        window_size: most recent positions that are always kept.
        sinks: first positions that are always kept.
        block_size: keys scored at once.
        rank_all: score even if everything stays, because the layer will be cut again.

    Raises:
        BudgetError: the budget is below the mandatory set.
        SelectorError: the selector's scores have the wrong shape or are not numbers, or its indices are not
            distinct places of the layer. Nothing was evicted.
    """
    length = layer.prompt_length
    if budget >= length and not rank_all:
        return _everything(layer)
    first, last = mandatory_ranges(length, window_size, sinks)
    count = _free_count(layer, budget, first, last)
    if rank_all:
        _needs_scores(selector, "layer_budget='cake'")
    chosen = selector.indices(layer, count, first, last)
    if chosen is not None:
        chosen = _checked_indices(chosen, layer, (first, last), count, selector)
        return _with_mandatory(layer, chosen, chosen[..., :0], first, last, scored=False)
    best = StreamingTopK(count)
    _rank(layer, selector, (first, last), block_size, best.push)
    if count == 0:
        nothing = torch.arange(0, device=layer.keys.device).expand(layer.keys.shape[0], layer.kv_heads, -1)
        return _with_mandatory(layer, nothing, nothing.float(), first, last)
    return _with_mandatory(layer, *best.result(), first, last)


def select_per_head(
    layer: FullLayer,
    selector: Selector,
    budget: int,
    *,
    window_size: int,
    sinks: int,
    block_size: int,
    floor_alpha: float,
) -> HeadKept:
    """Like :func:`select_positions`, the layer's ``Hkv * min(budget, S)`` positions shared between heads by Ada-KV.

    Two streams of top-k run side by side: each head's best K (a head never gets fewer than it would need for its
    even part) and the layer's best Hkv * K, so temporary memory is O(Hkv * K).
    """
    _needs_scores(selector, "head_budget='ada'")
    length, heads = layer.prompt_length, layer.kv_heads
    first, last = mandatory_ranges(length, window_size, sinks)
    count = _free_count(layer, min(budget, length), first, last)
    per_head, overall = StreamingTopK(count), StreamingTopK(count * heads)

    def push(scores: Tensor, start: int) -> None:
        per_head.push(scores, start)
        # The place of (position, head) in one row of all heads is position * heads + head.
        overall.push(scores.transpose(1, 2).flatten(1), start * heads)

    _rank(layer, selector, (first, last), block_size, push)
    nothing = layer.keys.new_zeros((layer.keys.shape[0], heads, 0), dtype=torch.long)
    each = per_head.result() if count else (nothing, nothing.float())
    best = overall.result() if count else (nothing[:, 0], nothing[:, 0].float())
    candidates: list[Ranked] = []
    counts: list[int] = []
    for row in range(layer.keys.shape[0]):
        shares, found = _candidates((each[0][row], each[1][row]), (best[0][row], best[1][row]), count)
        candidates += found
        counts += ada_head_budgets(shares, count, floor_alpha)
    return HeadKept(tuple(candidates), tuple(counts), first, last, length, heads, floor_alpha)


def _candidates(each: Ranked, best: Ranked, count: int) -> tuple[list[int], list[Ranked]]:
    """Per head of a row, how many of the layer's best lie in it, and its own best: at least ``count``.

    Both streams hold the start of the same ranking of the head: the longer one is enough.
    """
    heads = each[0].shape[0]
    owner = best[0] % heads
    shares: list[int] = owner.bincount(minlength=heads).tolist()
    found = []
    for head, share in enumerate(shares):
        mine = owner == head
        overall = best[0][mine] // heads, best[1][mine]
        found.append(overall if share > count else (each[0][head], each[1][head]))
    return shares, found


def _free_count(layer: FullLayer, budget: int, first: int, last: int) -> int:
    """How many positions the scores decide about."""
    mandatory = first + layer.prompt_length - last
    if budget < mandatory:
        raise BudgetError(
            f"kept_tokens={budget} is below the {mandatory} mandatory positions of layer {layer.index}; "
            f"raise it to {mandatory} or more"
        )
    return min(budget, layer.prompt_length) - mandatory


def _rank(
    layer: FullLayer,
    selector: Selector,
    span: tuple[int, int],
    block_size: int,
    push: Callable[[Tensor, int], None],
) -> None:
    """Score the keys of ``span`` block by block and push each block's scores."""
    first, last = span
    invalid = layer.keys.new_zeros((), dtype=torch.bool)
    scorer = selector.scorer(layer, block_size)
    if not callable(scorer):
        raise SelectorError(
            f"selector {selector.name!r} gave {type(scorer).__name__} where scorer() must return a function of "
            "(start, stop); nothing was evicted"
        )
    for start, stop in blocks(last - first, block_size):
        scores = checked_scores(scorer(first + start, first + stop), layer, stop - start, selector)
        invalid |= torch.isnan(scores).any()
        push(scores, first + start)
    if invalid:  # one look per layer: a device would have to wait for each
        raise SelectorError(
            f"selector {selector.name!r} gave NaN scores in layer {layer.index}; nothing was evicted. "
            "Check the selector, or load the model in float32"
        )


def _needs_scores(selector: Selector, what: str) -> None:
    if type(selector).indices is not Selector.indices:
        raise SelectorError(f"selector {selector.name!r} chooses indices, but {what} compares scores; use 'uniform'")


def _checked_indices(chosen: object, layer: FullLayer, span: tuple[int, int], count: int, selector: Selector) -> Tensor:
    """Indices int64 [B, Hkv, count], sorted, or :class:`SelectorError`."""
    expected, what = (layer.keys.shape[0], layer.kv_heads, count), f"selector {selector.name!r} gave indices"
    if not isinstance(chosen, Tensor):
        raise SelectorError(f"{what} as {type(chosen).__name__}, not as a tensor {expected}; nothing was evicted")
    if tuple(chosen.shape) != expected or chosen.is_floating_point() or chosen.is_complex():
        raise SelectorError(
            f"{what} of shape {tuple(chosen.shape)} and {chosen.dtype} where whole numbers {expected} "
            "[batch, kv_heads, count] were asked for; nothing was evicted"
        )
    ordered = chosen.long().sort(dim=-1).values
    if count and (int(ordered.min()) < span[0] or int(ordered.max()) >= span[1]):
        raise SelectorError(
            f"{what} from {int(ordered.min())} to {int(ordered.max())} in layer {layer.index}, outside the "
            f"range [{span[0]}, {span[1]}) it chooses from; nothing was evicted"
        )
    if bool((ordered.diff(dim=-1) == 0).any()):
        raise SelectorError(f"{what} twice in layer {layer.index}; give distinct ones. Nothing was evicted")
    return ordered


def _everything(layer: FullLayer) -> Kept:
    shape = (layer.keys.shape[0], layer.kv_heads)
    indices = torch.arange(layer.prompt_length, device=layer.keys.device).expand(*shape, -1)
    nothing = indices[..., :0]
    return Kept(indices, nothing, nothing.float())


def _with_mandatory(
    layer: FullLayer, positions: Tensor, scores: Tensor, first: int, last: int, *, scored: bool = True
) -> Kept:
    shape, device = (layer.keys.shape[0], layer.kv_heads), layer.keys.device
    sinks = torch.arange(first, device=device).expand(*shape, -1)
    window = torch.arange(last, layer.prompt_length, device=device).expand(*shape, -1)
    # Already ascending: sinks, then what was scored between the two, then the window.
    indices = torch.cat((sinks, positions, window), dim=-1)
    return Kept(indices, positions, scores) if scored else Kept(indices, positions[..., :0], scores.float())
