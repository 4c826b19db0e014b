"""LayerEndCompress (paper, Algorithm 2): choose the positions of a finished layer that stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.compress.scoring import StreamingTopK, blocks
from tidekv_llm.compress.selectors import Selector
from tidekv_llm.errors import BudgetError, SelectorError


@dataclass(frozen=True, slots=True)
class Kept:
    """Positions a layer keeps.

    Attributes:
        indices: int64 [B, Hkv, K], ascending.
        scored: int64 [B, Hkv, k], those of them that won by their score (K minus the mandatory ones).
        scores: float32 [B, Hkv, k], the scores they won by.
    """

    indices: Tensor
    scored: Tensor
    scores: Tensor


def mandatory_ranges(prompt_length: int, window_size: int, sinks: int) -> tuple[int, int]:
    """Ends of the two mandatory ranges: ``[0, a)`` and ``[b, prompt_length)`` are always kept.

    Example: 100 tokens, window 16, 4 sinks gives (4, 84); a prompt shorter than both gives everything.
    """
    recent_start = max(0, prompt_length - window_size)
    return min(sinks, recent_start), recent_start


def select_positions(
    layer: FullLayer, selector: Selector, budget: int, *, window_size: int, sinks: int, block_size: int
) -> Kept:
    """The K = min(budget, S) positions per KV head with the highest scores, mandatory ones included.

    Args:
        layer: the finished layer.
        selector: who scores.
        budget: K_l, the mandatory positions counted inside it.
        window_size: most recent positions that are always kept.
        sinks: first positions that are always kept.
        block_size: keys scored at once.

    Raises:
        BudgetError: the budget is below the mandatory set.
        SelectorError: the selector's scores have the wrong shape or are not numbers. Nothing was evicted.
    """
    length = layer.prompt_length
    if budget >= length:
        return _everything(layer)
    first, last = mandatory_ranges(length, window_size, sinks)
    mandatory = first + length - last
    if budget < mandatory:
        raise BudgetError(
            f"kept_tokens={budget} is below the {mandatory} mandatory positions of layer {layer.index}; "
            f"raise it to {mandatory} or more"
        )
    best, invalid = StreamingTopK(budget - mandatory), layer.keys.new_zeros((), dtype=torch.bool)
    scorer = selector.scorer(layer, block_size)
    for start, stop in blocks(last - first, block_size):
        scores = _checked(scorer(first + start, first + stop), layer, stop - start, selector)
        invalid |= torch.isnan(scores).any()
        best.push(scores, first + start)
    if invalid:  # one look per layer: a device would have to wait for each
        raise SelectorError(
            f"selector {selector.name!r} gave NaN scores in layer {layer.index}; nothing was evicted. "
            "Check the selector, or load the model in float32"
        )
    return _with_mandatory(layer, best, first, last)


def _checked(scores: Tensor, layer: FullLayer, count: int, selector: Selector) -> Tensor:
    expected = (layer.keys.shape[0], layer.kv_heads, count)
    if tuple(scores.shape) != expected:
        raise SelectorError(
            f"selector {selector.name!r} gave scores of shape {tuple(scores.shape)} where {expected} "
            "[batch, kv_heads, keys] was asked for; nothing was evicted"
        )
    return scores.float()


def _everything(layer: FullLayer) -> Kept:
    shape = (layer.keys.shape[0], layer.kv_heads)
    indices = torch.arange(layer.prompt_length, device=layer.keys.device).expand(*shape, -1)
    nothing = indices[..., :0]
    return Kept(indices, nothing, nothing.float())


def _with_mandatory(layer: FullLayer, best: StreamingTopK, first: int, last: int) -> Kept:
    shape, device = (layer.keys.shape[0], layer.kv_heads), layer.keys.device
    sinks = torch.arange(first, device=device).expand(*shape, -1)
    window = torch.arange(last, layer.prompt_length, device=device).expand(*shape, -1)
    if best.k == 0:
        return Kept(torch.cat((sinks, window), dim=-1), sinks[..., :0], sinks[..., :0].float())
    positions, scores = best.result()
    # Already ascending: sinks, then what was scored between the two, then the window.
    return Kept(torch.cat((sinks, positions, window), dim=-1), positions, scores)
