"""Selection with everything written out in float64: paper Eqs. 4-8 and the rules of the selectors' table."""

from __future__ import annotations

from torch import Tensor

from tests.reference.attention import causal_logits


def snapkv_scores(
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    *,
    kernel_size: int,
    pooling: str,
    softcap: float | None = None,
) -> list[list[list[float]]]:
    """Scores [batch][kv_head][S - W] of the keys before the observation window.

    Softmax over all causal keys, the own window included; weights 1/W; mean over the query heads of a KV head;
    then pooling over neighbours with stride 1 and padding kernel//2 (zeros take part in the average).
    """
    batch, heads, window, _ = queries.shape
    kv_heads, length = keys.shape[1:3]
    group, prefix = heads // kv_heads, length - window
    scores = []
    for row in range(batch):
        per_head = []
        for head in range(kv_heads):
            total = [0.0] * prefix
            for member in range(head * group, (head + 1) * group):
                logits = causal_logits(queries[row, member], keys[row, head], scaling, softcap=softcap)
                weights = logits.softmax(dim=-1)[:, :prefix].sum(dim=0) / window / group
                total = [a + float(b) for a, b in zip(total, weights, strict=True)]
            per_head.append(_pooled(total, kernel_size, pooling))
        scores.append(per_head)
    return scores


def _pooled(scores: list[float], kernel_size: int, pooling: str) -> list[float]:
    if pooling == "none":
        return scores
    half = kernel_size // 2
    pooled = []
    for index in range(len(scores)):
        neighbours = scores[max(0, index - half) : index + half + 1]
        pooled.append(max(neighbours) if pooling == "max" else sum(neighbours) / kernel_size)
    return pooled


def kept_positions(scores: list[float], length: int, budget: int, window: int, sinks: int) -> list[int]:
    """Eq. 8 for one head: sinks, window, and the best-scored others; a tie goes to the later position."""
    if budget >= length:
        return list(range(length))
    mandatory = set(range(min(sinks, length))) | set(range(max(0, length - window), length))
    rest = [position for position in range(length) if position not in mandatory]
    rest.sort(key=lambda position: (scores[position], position), reverse=True)
    return sorted(mandatory | set(rest[: budget - len(mandatory)]))
