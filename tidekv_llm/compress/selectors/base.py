"""The selector interface: a score for every key of a finished layer, asked for block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from tidekv_llm.compress.layer import FullLayer

if TYPE_CHECKING:
    from tidekv_llm.config import PrefillConfig

Scorer = Callable[[int, int], Tensor]


class Selector(ABC):
    """Scores keys; the highest ones outside the mandatory set are kept (paper, Eq. 8).

    Subclasses are small frozen dataclasses whose fields are the method's parameters. A selector holds no state
    between layers or prompts: what pass 1 finds lives in the closure that :meth:`scorer` returns.
    """

    name: ClassVar[str]
    #: Whether the scores depend on the question (its queries are in the observation window).
    query_aware: ClassVar[bool] = False

    @abstractmethod
    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        """Prepare a layer and return ``scores(start, stop)``: float32 [B, Hkv, stop - start]."""

    @classmethod
    def from_config(cls, config: PrefillConfig) -> Selector:
        """The selector that the options describe; override where fields come from them."""
        return cls()
