"""Causal attention with everything written out: float64, one dense matrix, one query head at a time.

Paper, Eq. 4 for the logits; a query at position p sees keys 0..p, or with a sliding window of w the last w of
them, its own included. Softcap and attention sinks as in the Gemma 2 and gpt-oss papers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def causal_logits(
    query: Tensor, key: Tensor, scaling: float, *, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Logits of one query head [C, L]; the C queries are the last C of L positions."""
    count, length = query.shape[0], key.shape[0]
    logits = query.double() @ key.double().T * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(length - count, length)[:, None]
    key_position = torch.arange(length)[None, :]
    unseen = key_position > position
    if window is not None:
        unseen = unseen | (key_position <= position - window)
    logits[unseen] = -math.inf
    return logits


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, C, Hq, Dv] and log-sum-exp over the keys alone [B, Hq, C], both float64."""
    batch, heads, count, _ = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(batch, count, heads, value.shape[-1], dtype=torch.float64)
    lse = torch.zeros(batch, heads, count, dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            shared = head // group
            logits = causal_logits(query[row, head], key[row, shared], scaling, window=window, softcap=softcap)
            weights = logits.exp()
            total = weights.sum(dim=-1)
            lse[row, head] = total.log()
            if sinks is not None:
                total = total + math.exp(float(sinks[head]))
            out[row, :, head] = weights @ value[row, shared].double() / total[:, None]
    return out, lse
