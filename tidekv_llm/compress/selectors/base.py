"""The selector interface: a score for every key of a finished layer, asked for block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from tidekv_llm.cache.full_layer import Accumulator, FullLayer
from tidekv_llm.config import SELECTORS, NamedSelector, PrefillConfig
from tidekv_llm.errors import ConfigError, SelectorError

Scorer = Callable[[int, int], Tensor]


class Selector(NamedSelector, ABC):
    """Scores keys; the highest ones outside the mandatory set are kept (paper, Eq. 8).

    Subclasses are small frozen dataclasses whose fields are the method's parameters. A selector holds no state
    between layers or prompts: what pass 1 finds lives in the closure that :meth:`scorer` returns.
    """

    #: Whether the scores depend on the question (its queries are in the observation window).
    query_aware: ClassVar[bool] = False
    #: How many neighbouring layers share the first one's choice.
    reuse_layers: int = 1

    @abstractmethod
    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        """Prepare a layer and return ``scores(start, stop)``: float32 [B, Hkv, stop - start]."""

    def accumulator(self, prompt_length: int) -> Accumulator | None:
        """A fresh accumulator for one layer of S positions, or None if the observation window is enough.

        The scheduler feeds it every chunk and hands it back as :attr:`FullLayer.accumulated`.
        """
        return None

    @property
    def needs_all_queries(self) -> bool:
        """Whether every query of the prompt must be seen, so that no stored prefix can be used."""
        return type(self).accumulator is not Selector.accumulator

    def indices(self, layer: FullLayer, count: int, first: int, last: int) -> Tensor | None:
        """Choose directly: int64 [B, Hkv, count] of the range [first, last), or None to go by the scores."""
        return None

    @classmethod
    def from_config(cls, config: PrefillConfig) -> Selector:
        """The selector that the options describe; override where fields come from them."""
        return cls()


SelectorClass = TypeVar("SelectorClass", bound=type[Selector])


def register_selector(selector: SelectorClass) -> SelectorClass:
    """Make a selector class known by its ``name``; usable as a decorator.

    Raises:
        ConfigError: the name is missing or taken by another class.
    """
    name = getattr(selector, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"selector {selector.__name__} has no name; give the class a `name` string")
    taken = SELECTORS.get(name) or selector
    if taken is not selector:
        raise ConfigError(f"selector name {name!r} is taken by {taken.__name__}; choose another")
    SELECTORS[name] = selector
    return selector


def checked_scores(scores: object, layer: FullLayer, count: int, selector: Selector) -> Tensor:
    """What a scorer returned for ``count`` keys, as float32.

    Raises:
        SelectorError: it is no tensor [B, Hkv, count] of real numbers on the layer's device.
    """
    expected = (layer.keys.shape[0], layer.kv_heads, count)
    wanted = f"a tensor of shape {expected} [batch, kv_heads, keys] on {layer.keys.device}"
    who = f"selector {selector.name!r}"
    if not isinstance(scores, Tensor):
        raise SelectorError(f"{who} gave {type(scores).__name__} where {wanted} was asked for; nothing was evicted")
    if tuple(scores.shape) != expected:
        raise SelectorError(
            f"{who} gave scores of shape {tuple(scores.shape)} where {expected} [batch, kv_heads, keys] "
            "was asked for; nothing was evicted"
        )
    if scores.device != layer.keys.device or scores.is_complex():
        raise SelectorError(f"{who} gave {scores.dtype} on {scores.device}, not {wanted}; nothing was evicted")
    return scores.to(torch.float32)
