"""Budgets: how many KV positions each layer and each head keeps. Pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Callable

LayerBudget = Callable[[int, int], list[int]]


def uniform_layer_budgets(kept_tokens: int, num_layers: int) -> list[int]:
    """The same budget for every layer: ``[kept_tokens] * num_layers``."""
    return [kept_tokens] * num_layers


LAYER_BUDGETS: dict[str, LayerBudget] = {"uniform": uniform_layer_budgets}
HEAD_BUDGETS: tuple[str, ...] = ("uniform",)
