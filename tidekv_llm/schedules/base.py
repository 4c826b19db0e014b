"""The interface of a schedule: how it builds a cache, and what that costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from tidekv_llm.costs.plan import Moments, Plan
    from tidekv_llm.hf import Decoder
    from tidekv_llm.prefill.result import Construction
    from tidekv_llm.prefill.task import PrefillTask


class Schedule(ABC):
    """An order in which the cache of a prompt is built."""

    name: ClassVar[str]
    #: Whether ``task.reader`` and ``task.writer`` are used; a schedule that says no must not be given them.
    reuses_prefix: ClassVar[bool] = False
    #: Whether ``chunk_size`` changes it; others take the prompt whole, or have a step of their own.
    takes_chunk_size: ClassVar[bool] = True

    @abstractmethod
    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        """Cache, hidden states and evidence from ids [B, S].

        Raises:
            Cancelled: within one chunk step of the caller's wish.
        """

    @abstractmethod
    def cost(self, plan: Plan) -> Moments:
        """The bytes that :meth:`build` holds at its critical moments, from the model's dimensions alone."""
