"""Every selector's scores and every budget with everything written out, in float64 and plain Python.

Scores are [batch][kv_head][S - W] lists, as in :mod:`tests.reference.selection`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.attention import causal_logits

Scores = list[list[list[float]]]


def window_attention(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Softmax of the last W queries over all causal keys: float64 [B, Hq, W, S]."""
    batch, heads = queries.shape[:2]
    group = heads // keys.shape[1]
    rows = [
        torch.stack([causal_logits(queries[b, h], keys[b, h // group], scaling).softmax(dim=-1) for h in range(heads)])
        for b in range(batch)
    ]
    return torch.stack(rows)


def recency_snapkv_scores(queries: Tensor, keys: Tensor, scaling: float) -> Scores:
    """Eq. 7 with w_q rising linearly, no pooling."""
    attention = window_attention(queries, keys, scaling)
    window, length = attention.shape[2:]
    weights = torch.tensor([2 * (q + 1) / (window * (window + 1)) for q in range(window)], dtype=torch.float64)
    per_query_head = (attention * weights[:, None]).sum(dim=2)[..., : length - window]
    return _group_mean(per_query_head, keys.shape[1])


def chunkkv_scores(queries: Tensor, keys: Tensor, scaling: float, chunk_length: int, stride: int) -> Scores:
    """Mean window attention per token, summed over KV heads, then the best mean of the chunks it lies in.

    Chunks start at every multiple of ``stride``; the first one to reach the window is the last.
    """
    attention = window_attention(queries, keys, scaling).mean(dim=2)
    prefix = keys.shape[2] - queries.shape[2]
    result = []
    for row in _group_mean(attention[..., :prefix], keys.shape[1]):
        tokens = [sum(head[i] for head in row) for i in range(prefix)]
        best = [-math.inf] * prefix
        for start in range(0, prefix, stride):
            chunk = tokens[start : start + chunk_length]
            for i in range(start, start + len(chunk)):
                best[i] = max(best[i], sum(chunk) / len(chunk))
            if start + chunk_length >= prefix:
                break
        result.append([best for _ in row])
    return result


def keydiff_scores(keys: Tensor, segments: int, *, shared: bool) -> Scores:
    """-cos(k_i, mean of the unit-normalised keys of its segment), every position; shared: mean over the heads."""
    wide = keys.double()
    unit = wide / wide.norm(dim=-1, keepdim=True)
    length = keys.shape[2]
    parts = []
    for segment in range(segments):
        part = unit[:, :, segment * length // segments : (segment + 1) * length // segments]
        anchor = part.mean(dim=2, keepdim=True)
        parts.append(-(part * anchor).sum(dim=-1) / anchor.norm(dim=-1))
    scores = torch.cat(parts, dim=-1)
    if shared:
        scores = (scores.sum(dim=1, keepdim=True) / scores.shape[1]).expand_as(scores)
    return scores.tolist()  # type: ignore[no-any-return]


def h2o_scores(all_queries: Tensor, keys: Tensor, scaling: float) -> Scores:
    """Attention of all queries, summed over them, mean over the group, every position."""
    attention = window_attention(all_queries, keys, scaling)  # the window is the whole prompt
    return _group_mean(attention.sum(dim=2), keys.shape[1])


def expected_attention_scores(
    all_queries: Tensor, keys: Tensor, values: Tensor, scaling: float, *, covariance: bool, norm: bool, epsilon: float
) -> Scores:
    """Softmax of mean and covariance logits, mean over the group, times the value's length."""
    batch, heads = all_queries.shape[:2]
    kv_heads, length = keys.shape[1:3]
    per_query_head = torch.zeros(batch, heads, length, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            q, k = all_queries[b, h].double(), keys[b, h * kv_heads // heads].double()
            mean, centred = q.mean(dim=0), q - q.mean(dim=0)
            logits = k @ mean * scaling
            if covariance:
                second = centred.T @ centred / q.shape[0]
                logits = logits + torch.stack([key @ second @ key for key in k]) * scaling**2 / 2
            per_query_head[b, h] = logits.softmax(dim=-1)
    scores = torch.tensor(_group_mean(per_query_head, kv_heads), dtype=torch.float64) + epsilon
    return (scores * values.double().norm(dim=-1) if norm else scores).tolist()  # type: ignore[no-any-return]


def _group_mean(per_query_head: Tensor, kv_heads: int) -> Scores:
    batch, heads, count = per_query_head.shape
    return per_query_head.view(batch, kv_heads, heads // kv_heads, count).mean(dim=2).tolist()  # type: ignore[no-any-return]


def ada_kept(
    scores: list[list[float]], length: int, budget: int, window: int, sinks: int, alpha: float
) -> list[list[int]]:
    """One row's kept positions per head under Ada-KV: largest remainder, the total exactly heads * budget."""
    heads = len(scores)
    if budget >= length:
        return [list(range(length))] * heads
    mandatory = set(range(min(sinks, length))) | set(range(max(0, length - window), length))
    free = [position for position in range(length) if position not in mandatory]
    base = budget - len(mandatory)
    ranked = sorted(
        ((scores[head][position], position, head) for head in range(heads) for position in free), reverse=True
    )
    share = [sum(1 for _, _, head in ranked[: heads * base] if head == wanted) for wanted in range(heads)]
    exact = [(1 - alpha) * c + alpha * base for c in share]
    counts = [math.floor(x + 1e-9) for x in exact]
    for head in sorted(range(heads), key=lambda h: (counts[h] - exact[h], h))[: heads * base - sum(counts)]:
        counts[head] += 1
    return [
        sorted(mandatory | set(sorted(free, key=lambda p: (scores[head][p], p), reverse=True)[: counts[head]]))
        for head in range(heads)
    ]


def cake_spread(queries: Tensor, keys: Tensor, scaling: float) -> tuple[float, float]:
    """Entropy and variance of the window's attention before the window."""
    window = queries.shape[2]
    attention = window_attention(queries, keys, scaling)[..., : keys.shape[2] - window]
    entropy = -(attention * attention.clamp_min(1e-300).log()).sum()
    return float(entropy), float(attention.var(dim=2).sum())
