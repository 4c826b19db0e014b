"""Attention of a single new token over all heads at once: no loop over heads, no key copied.

Both layouts compute with one product for the scores and one for the values:

- equal heads: a batched product over their slots;
- heads of different lengths: every query against every head's rows, and what belongs to another head is masked. That
  is Hkv times the arithmetic, which costs less than a call per head: the rows are read once either way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionParams, softcap_
from tidekv_llm.cache.rows import PromptRows

# A product in 16 bits on a CPU copies keys that do not lie end to end, every token anew (222 against 80 µs at 1,024
# positions of 3 heads); running over the free slots between them is cheaper until there are as many as used ones.
_MOST_SLOTS_PER_USED = 2


def attend_to_slots(
    query: Tensor, keys: Tensor, values: Tensor, used: tuple[int, int], params: AttentionParams
) -> Tensor:
    """Attention over slots that all heads use alike.

    Args:
        query: [B, Hq, 1, D].
        keys: [B, Hkv, slots, D]; free slots hold finite numbers.
        values: [B, Hkv, slots, Dv].
        used: first and end of the slots that the token sees, its own included.
        params: scaling, softcap and sinks.

    Returns:
        [B, 1, Hq, Dv].
    """
    batch, kv_heads, slots, _ = keys.shape
    first, end = used
    whole = query.device.type == "cpu" and query.element_size() == 2 and slots <= _MOST_SLOTS_PER_USED * (end - first)
    if not whole:
        keys, values = keys[:, :, first:end], values[:, :, first:end]
    scores = torch.bmm(
        query.reshape(batch * kv_heads, -1, query.shape[-1]) * params.scaling,
        keys.flatten(0, 1).transpose(1, 2),
    )
    softcap_(scores, params.softcap)
    if whole:
        scores[..., :first] = -math.inf
        scores[..., end:] = -math.inf
    shares = _shares(scores, params.sinks)
    return torch.bmm(shares, values.flatten(0, 1)).view(batch, 1, query.shape[1], -1)


def attend_to_rows(query: Tensor, rows: PromptRows, tail: tuple[Tensor, Tensor], params: AttentionParams) -> Tensor:
    """Attention over heads of different lengths, and a tail that is equally long for all.

    Args:
        query: [1, Hq, 1, D].
        rows: the prompt's kept keys and values.
        tail: keys [1, Hkv, T, D] and values [1, Hkv, T, Dv] of later tokens, the newest included.
        params: scaling, softcap and sinks.

    Returns:
        [1, 1, Hq, Dv].
    """
    kv_heads, heads = tail[0].shape[1], query.shape[1]
    group = heads // kv_heads
    scaled = query.reshape(kv_heads, group, -1) * params.scaling  # [Hkv, G, D]
    (keys, values), owner = rows.all(), rows.owner
    past = torch.mm(scaled.flatten(0, 1), keys.t()).view(kv_heads, group, keys.shape[0])
    new = torch.bmm(scaled, tail[0][0].transpose(1, 2))
    scores = softcap_(torch.cat((past, new), dim=-1), params.softcap)
    mine = torch.arange(kv_heads, device=owner.device, dtype=owner.dtype)
    scores[..., : keys.shape[0]].masked_fill_(owner != mine[:, None, None], -math.inf)
    shares = _shares(scores, params.sinks)
    out = torch.mm(shares[..., : keys.shape[0]].reshape(heads, -1), values).view(kv_heads, group, values.shape[-1])
    return out.baddbmm_(shares[..., keys.shape[0] :], tail[1][0]).view(1, 1, heads, -1)


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of [B * Hkv, G, n]; a sink takes its share and gives no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    logits = sinks.to(scores.dtype).view(-1, scores.shape[1], 1).expand(scores.shape[0], -1, 1)
    return torch.softmax(torch.cat((scores, logits), dim=-1), dim=-1)[..., :-1]
