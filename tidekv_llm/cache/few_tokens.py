"""Attention of a few new tokens over all heads at once: no loop over heads, no key copied.

Both layouts compute with one product for the scores and one for the values:

- equal heads: a batched product over their slots;
- heads of different lengths: every query against every head's rows, and what belongs to another head is masked. That
  is Hkv times the arithmetic, which costs less than a call per head: the rows are read once either way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionParams, mask_future_, softcap_
from tidekv_llm.cache.rows import PromptRows

# Up to so many tokens at a time; more, a long prompt's chunk, take tiles.
FEW = 64
# A product in 16 bits on a CPU copies keys that do not lie end to end, every token anew (222 against 80 µs at 1,024
# positions of 3 heads); running over the free slots between them is cheaper until there are as many as used ones.
_MOST_SLOTS_PER_USED = 2


def attend_to_slots(query: Tensor, keys: Tensor, values: Tensor, used: int, params: AttentionParams) -> Tensor:
    """Attention over slots that all heads use alike, the C newest of them causally.

    Args:
        query: [B, Hq, C, D].
        keys: [B, Hkv, slots, D]; free slots hold finite numbers.
        values: [B, Hkv, slots, Dv].
        used: slots in use, the queries' own included.
        params: scaling, window, softcap and sinks.

    Returns:
        [B, C, Hq, Dv].
    """
    (batch, kv_heads, slots, _), (heads, count) = keys.shape, query.shape[1:3]
    first = 0 if params.window is None else max(0, used - count + 1 - params.window)
    whole = query.device.type == "cpu" and query.element_size() == 2 and slots <= _MOST_SLOTS_PER_USED * (used - first)
    start, end = (0, slots) if whole else (first, used)
    folded = query.reshape(batch * kv_heads, -1, query.shape[-1]) * params.scaling  # [B * Hkv, G * C, D]
    scores = torch.bmm(folded, keys[:, :, start:end].flatten(0, 1).transpose(1, 2))
    softcap_(scores, params.softcap)
    _mask_unseen_(scores.view(len(scores), -1, count, end - start), used - count - start, params.window)
    shares = _shares(scores, params.sinks, count)
    out = torch.bmm(shares, values[:, :, start:end].flatten(0, 1))
    return _by_token(out, (batch, heads, count))


def attend_to_rows(query: Tensor, rows: PromptRows, tail: tuple[Tensor, Tensor], params: AttentionParams) -> Tensor:
    """Attention over heads of different lengths, and a tail that is equally long for all, its C newest causally.

    Args:
        query: [1, Hq, C, D].
        rows: the prompt's kept keys and values.
        tail: keys [1, Hkv, T, D] and values [1, Hkv, T, Dv] of later tokens, the newest included.
        params: scaling, softcap and sinks.

    Returns:
        [1, C, Hq, Dv].
    """
    kv_heads, (heads, count) = tail[0].shape[1], query.shape[1:3]
    folded = query.reshape(kv_heads, heads // kv_heads * count, -1) * params.scaling  # [Hkv, G * C, D]
    (keys, values), owner = rows.all(), rows.owner
    kept = keys.shape[0]
    past = torch.mm(folded.flatten(0, 1), keys.t()).view(kv_heads, folded.shape[1], kept)
    new = torch.bmm(folded, tail[0][0].transpose(1, 2))
    _mask_unseen_(new.view(kv_heads, -1, count, new.shape[2]), new.shape[2] - count, None)
    scores = torch.cat((softcap_(past, params.softcap), softcap_(new, params.softcap)), dim=-1)
    mine = torch.arange(kv_heads, device=owner.device, dtype=owner.dtype)
    scores[..., :kept].masked_fill_(owner != mine[:, None, None], -math.inf)
    shares = _shares(scores, params.sinks, count)
    out = torch.mm(shares[..., :kept].flatten(0, -2), values).view(kv_heads, -1, values.shape[-1])
    return _by_token(out.baddbmm_(shares[..., kept:], tail[1][0]), (1, heads, count))


def _mask_unseen_(scores: Tensor, own: int, window: int | None) -> None:
    """Minus infinity for what a query must not see: [..., C, keys], whose row r stands at key ``own + r``."""
    count, keys = scores.shape[-2:]
    if count > 1:
        mask_future_(scores, own)
    elif own + 1 < keys:
        scores[..., own + 1 :] = -math.inf
    if window is None or own + count <= window:
        return
    oldest = torch.arange(own, own + count, device=scores.device) - window + 1
    place = torch.arange(keys, device=scores.device)
    scores.masked_fill_(place[None, :] < oldest[:, None], -math.inf)


def _by_token(out: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """[B * Hkv, G * C, Dv] as [B, C, Hq, Dv]."""
    batch, heads, count = shape
    return out.view(batch, heads, count, -1).transpose(1, 2)


def _shares(scores: Tensor, sinks: Tensor | None, count: int) -> Tensor:
    """Softmax of [B * Hkv, G * C, n]; a sink takes its share and gives no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    group = scores.shape[1] // count
    logits = sinks.to(scores.dtype).view(-1, group).repeat(len(scores) * group // len(sinks), 1)  # [B * Hkv, G]
    logits = logits.repeat_interleave(count, dim=1)[..., None]
    return torch.softmax(torch.cat((scores, logits), dim=-1), dim=-1)[..., :-1]
