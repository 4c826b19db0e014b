"""The distribution of the next token in plain Python: temperature, then top-k, then top-p."""

from __future__ import annotations

import math


def token_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities after the filters; what is filtered out has 0."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    total = sum(weights.values())
    kept, reached = [], 0.0
    for token in order:  # the smallest set whose probability reaches top_p
        kept.append(token)
        reached += weights[token] / total
        if reached >= top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]
