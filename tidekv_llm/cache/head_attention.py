"""Decode attention over heads of different lengths, without padding any to the longest.

The kept prompt lies in a :class:`~tidekv_llm.cache.rows.PromptRows`, tokens that came later in a rectangular
tail: all queries see the whole prompt part, and the tail causally.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tidekv_llm.attention import (
    TILE_BYTES,
    AttentionParams,
    Scratch,
    apply_sinks,
    flash_attn_takes,
    mask_future_,
    softcap_,
)
from tidekv_llm.cache.rows import FlatRows, PromptRows

# Score rows are a multiple of this many elements.
ROW_STEP = 256


def head_attention(
    query: Tensor, store: PromptRows, tail: tuple[Tensor, Tensor], params: AttentionParams, scratch: Scratch
) -> Tensor:
    """Attention of the last C tokens.

    Args:
        query: [B, Hq, C, D].
        store: the prompt's kept keys and values.
        tail: keys [B, Hkv, T, D] and values [B, Hkv, T, Dv] of later tokens, the C newest included.
        params: scaling, softcap and sinks.
        scratch: where temporaries live; the output may be a view of it, valid until the next call.

    Returns:
        [B, C, Hq, Dv].
    """
    if isinstance(store, FlatRows) and flash_attn_takes(query):
        return varlen_attention(query, store, tail, params)
    return grouped_attention(query, store, tail, params, scratch)


def grouped_attention(
    query: Tensor, store: PromptRows, tail: tuple[Tensor, Tensor], params: AttentionParams, scratch: Scratch
) -> Tensor:
    """KV head after KV head, each with the query heads of its group, on any device and dtype."""
    batch, heads, count, _ = query.shape
    kv_heads, value_dim = tail[1].shape[1], tail[1].shape[3]
    group = heads // kv_heads
    out = scratch.take("attention_out", (batch, count, heads, value_dim), query)
    for index in range(batch * kv_heads):
        row, head = divmod(index, kv_heads)
        mine = slice(head * group, (head + 1) * group)
        keys, values = store.head(index)
        tail_keys, tail_values = tail[0][row, head], tail[1][row, head]
        sinks = None if params.sinks is None else params.sinks[mine]
        slots = keys.shape[0] + tail_keys.shape[0]
        tile = max(1, min(count, TILE_BYTES // (group * slots * query.element_size())))
        for start in range(0, count, tile):
            queries = query[row, mine, start : start + tile]
            stop = start + queries.shape[1]
            visible = tail_keys.shape[0] - count + stop  # the tail as the tile's last query sees it
            scores = _scores(queries, keys, tail_keys[:visible], params, sinks, scratch)
            result = torch.mm(scores[:, : keys.shape[0]], values)
            end = keys.shape[0] + visible
            result.addmm_(scores[:, keys.shape[0] : end].contiguous(), tail_values[:visible])
            out[row, start:stop, mine] = result.view(group, stop - start, value_dim).transpose(0, 1)
    return out


def _scores(
    queries: Tensor, keys: Tensor, tail: Tensor, params: AttentionParams, sinks: Tensor | None, scratch: Scratch
) -> Tensor:
    """Softmax rows [G * c, n + t (+ 1 for a sink), padded] of queries [G, c, D] over keys [n, D] and tail [t, D]."""
    group, count, dim = queries.shape
    folded, kept = queries.reshape(group * count, dim), keys.shape[0]
    end = kept + tail.shape[0]
    # A product with a new shape or row stride costs its kernel's set-up anew, every head's at every token: rows are
    # padded to a multiple that few tokens cross, and the tail's products have no stride of their own.
    used = end if sinks is None else end + 1
    width = -(-used // ROW_STEP) * ROW_STEP
    capacity = TILE_BYTES // queries.element_size()
    scores = scratch.take("tile_scores", (group * count, width), queries, capacity=capacity)
    torch.addmm(scores[:, :kept], folded, keys.t(), beta=0, alpha=params.scaling, out=scores[:, :kept])
    scores[:, kept:end] = torch.mm(folded, tail.t()).mul_(params.scaling)
    scores[:, used:] = -math.inf
    softcap_(scores[:, :end], params.softcap)
    mask_future_(scores.view(group, count, width)[..., :end], end - count)
    if sinks is not None:  # a logit without a value
        scores.view(group, count, width)[..., end] = sinks[:, None]
    return torch.softmax(scores, dim=-1, out=scores)


def varlen_attention(query: Tensor, store: FlatRows, tail: tuple[Tensor, Tensor], params: AttentionParams) -> Tensor:
    """CUDA: every KV head is a sequence of its own for the prompt part; the tail is merged by log-sum-exp."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    batch, heads, count, dim = query.shape
    kv_heads = tail[0].shape[1]
    sequences, group = batch * kv_heads, heads // kv_heads
    options = {"softmax_scale": params.scaling, "softcap": params.softcap or 0.0, "return_attn_probs": True}
    # Sequence i holds the C tokens of KV head i, with the group as its query heads.
    rows = query.reshape(sequences, group, count, dim).transpose(1, 2).reshape(sequences * count, group, dim)
    starts = torch.arange(0, sequences * count + 1, count, dtype=torch.int32, device=query.device)
    past, past_lse, *_ = flash_attn_varlen_func(
        rows,
        store.keys.unsqueeze(1),
        store.values.unsqueeze(1),
        cu_seqlens_q=starts,
        cu_seqlens_k=store.cu_klen,
        max_seqlen_q=count,
        max_seqlen_k=store.max_klen,
        causal=False,
        **options,
    )
    past = past.view(batch, kv_heads, count, group, -1).permute(0, 2, 1, 3, 4).reshape(batch, count, heads, -1)
    past_lse = past_lse.view(group, batch, kv_heads, count).permute(1, 2, 0, 3).reshape(batch, heads, count)
    new, new_lse, *_ = flash_attn_func(
        query.transpose(1, 2), tail[0].transpose(1, 2), tail[1].transpose(1, 2), causal=True, **options
    )
    lse = torch.logaddexp(past_lse, new_lse)  # [B, Hq, C]
    out: Tensor = past * _share(past_lse, lse, past) + new * _share(new_lse, lse, new)
    if params.sinks is not None:
        apply_sinks(out, lse, params.sinks)
    return out


def _share(part: Tensor, whole: Tensor, like: Tensor) -> Tensor:
    """exp(part - whole) of log-sum-exps [B, Hq, C], as [B, C, Hq, 1]."""
    return torch.exp(part - whole).transpose(1, 2).unsqueeze(-1).to(like.dtype)
