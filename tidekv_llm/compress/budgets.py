"""Budgets: how many KV positions each layer and each head keeps. Pure functions of their arguments.

Every function's result sums to the stated total exactly, and every budget lies between what is mandatory and
what there is: fractions are settled by the largest remainder.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tidekv_llm.errors import BudgetError


def uniform_layer_budgets(kept_tokens: int, num_layers: int) -> list[int]:
    """The same budget for every layer: ``[kept_tokens] * num_layers``."""
    return [kept_tokens] * num_layers


def pyramid_layer_budgets(
    kept_tokens: int, num_layers: int, *, prompt_length: int, window_size: int, sinks: int, beta: int = 20
) -> list[int]:
    """PyramidKV (arXiv 2406.02069): budgets fall linearly from the first layer to the last.

    With b = K - W the last layer gets b / beta + W and the first as much above the mean as the last is below it;
    the first is capped at the prompt, the last raised to the sinks, and the other end gives way so that the mean
    stays K. The original rounds down step by step, which drifts from the total; here it is exactly
    ``num_layers * min(kept_tokens, prompt_length)``.

    Example: 3 layers, K=100, W=20, no sinks, 1,000 tokens, beta 8: b = 80, so 150 + 20, 80 + 20, 10 + 20.

    Raises:
        BudgetError: ``kept_tokens`` is below window and sinks.
    """
    check_feasible(kept_tokens, min(window_size + sinks, prompt_length))
    if kept_tokens >= prompt_length or num_layers == 1:
        return [min(kept_tokens, prompt_length)] * num_layers
    mean, most = kept_tokens - window_size, prompt_length - window_size
    low = max(Fraction(mean, beta), Fraction(2 * mean - most), Fraction(sinks))
    high = 2 * mean - low
    step = (high - low) / (num_layers - 1)
    shares = [high - layer * step + window_size for layer in range(num_layers)]
    return round_to_total(shares, num_layers * kept_tokens, [prompt_length] * num_layers)


def cake_layer_budgets(preferences: Sequence[float], total: int, *, mandatory: int, caps: Sequence[int]) -> list[int]:
    """CAKE (arXiv 2503.12491): in proportion to each layer's preference, above what is mandatory.

    Args:
        preferences: of the layers that are finished, at least 0.
        total: positions to share out; never more than ``sum(caps)`` is.
        mandatory: what every layer keeps.
        caps: most positions of each layer: what it still holds, the prompt for the newest one.

    Raises:
        BudgetError: ``total`` is below the mandatory positions of all layers.
    """
    count = len(preferences)
    check_feasible(total // count, mandatory)
    room = [cap - mandatory for cap in caps]
    shares = _water_fill(preferences, min(total, sum(caps)) - count * mandatory, room)
    return [mandatory + extra for extra in shares]


def cake_preference(entropy: float, variance: float, *, tau_entropy: float = 1.0, tau_variance: float = 1.0) -> float:
    """CAKE's layer preference H^(1/tau1) * V^(1/tau2) (section 4.1)."""
    # A float's noise can push an entropy that is zero below it.
    return float(max(entropy, 0.0) ** (1 / tau_entropy) * max(variance, 0.0) ** (1 / tau_variance))


def ada_head_budgets(
    shares: Sequence[int], budget: int, floor_alpha: float, caps: Sequence[int] | None = None
) -> list[int]:
    """Ada-KV (arXiv 2407.11550): ``(1 - alpha) * c_i + alpha * budget`` for each head, the total exact.

    Args:
        shares: c_i, how many of the layer's best ``heads * budget`` scores lie in head i; they sum to that.
        budget: mean positions per head, mandatory ones not counted.
        floor_alpha: alpha, the part that is shared out evenly.
        caps: most positions of each head, for a layer that is cut again.

    Example: shares 6, 1, 2, a budget of 3 and alpha 0.5 give 4.5, 2, 2.5, rounded to 5, 2, 2.
    """
    alpha = Fraction(floor_alpha).limit_denominator(10**6)
    wanted = [(1 - alpha) * share + alpha * budget for share in shares]
    return round_to_total(wanted, len(shares) * budget, list(caps or [len(shares) * budget] * len(shares)))


def check_feasible(budget: int, mandatory: int) -> None:
    """Raise :class:`BudgetError` if a budget is below what must be kept."""
    if budget < mandatory:
        raise BudgetError(
            f"kept_tokens={budget} is below the {mandatory} mandatory positions of every layer; "
            f"raise it to {mandatory} or more"
        )


def round_to_total(shares: Sequence[Fraction], total: int, caps: Sequence[int]) -> list[int]:
    """Whole numbers near ``shares`` that sum to ``total``, none above its cap.

    Largest remainder first, the earlier one on a tie. What caps cut off goes on to the others in the same order.
    """
    budgets = [min(int(share), cap) for share, cap in zip(shares, caps, strict=True)]
    order = sorted(range(len(shares)), key=lambda index: (budgets[index] - shares[index], index))
    while (missing := total - sum(budgets)) > 0:
        open_ones = [index for index in order if budgets[index] < caps[index]]
        assert open_ones, "caps are below the total"
        for index in open_ones[:missing]:
            budgets[index] += 1
    return budgets


def _water_fill(weights: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """Share ``total`` in proportion to ``weights``; what exceeds a cap is shared among the others again."""
    exact = [Fraction(weight) for weight in weights]
    if not any(exact):
        exact = [Fraction(1)] * len(exact)
    shares = [Fraction(0)] * len(exact)
    active, left = list(range(len(exact))), Fraction(total)
    while active and left > 0:
        weight = sum(exact[index] for index in active)
        if weight == 0:
            break  # only layers without preference have room: rounding hands the rest out in order
        full = [index for index in active if left * exact[index] >= caps[index] * weight]
        for index in full or active:
            shares[index] = Fraction(caps[index]) if full else left * exact[index] / weight
        if not full:
            break
        left -= sum(caps[index] for index in full)
        active = [index for index in active if index not in full]
    return round_to_total(shares, total, caps)
