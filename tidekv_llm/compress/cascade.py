"""CAKE's cascade: layers that are finished share the whole budget, and are cut again as more layers finish."""

from __future__ import annotations

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.cache.layer import StoredLayer
from tidekv_llm.compress.budgets import cake_layer_budgets, cake_preference
from tidekv_llm.compress.layer_end import HeadKept, Kept
from tidekv_llm.compress.scoring import window_spread


class Cascade:
    """The layers of one request so far, what they keep and how much they prefer to keep.

    After n layers they hold ``min(total, n * prompt_length)`` positions together, so memory never exceeds that of
    the final cache. Cutting keeps the best scores of what is left: the result is that of selecting with the final
    budget at once.

    Args:
        total: positions of all layers together, ``layers * kept_tokens``.
        mandatory: what every layer keeps.
    """

    def __init__(self, total: int, mandatory: int) -> None:
        self._total, self._mandatory = total, mandatory
        self._preferences: list[float] = []
        self.budgets: list[int] = []
        self.layers: list[tuple[StoredLayer, Kept | HeadKept]] = []

    def make_room(self, layer: FullLayer, block_size: int) -> int:
        """Cut the earlier layers to their new budgets and return the budget of ``layer``."""
        self._preferences.append(cake_preference(*window_spread(layer, block_size)))
        caps = [*self.budgets, layer.prompt_length]
        budgets = cake_layer_budgets(self._preferences, self._total, mandatory=self._mandatory, caps=caps)
        for number, (stored, kept) in enumerate(self.layers):
            if budgets[number] < self.budgets[number]:
                kept = kept.cut(budgets[number])
                stored.retain(kept.heads())
                self.layers[number] = (stored, kept)
        self.budgets = budgets
        return budgets[-1]

    def add(self, stored: StoredLayer, kept: Kept | HeadKept) -> None:
        """Remember a layer that was stored with the budget :meth:`make_room` gave it."""
        self.layers.append((stored, kept))
