"""The interface of a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from tidekv_llm.hf import Decoder
    from tidekv_llm.prefill.result import Construction
    from tidekv_llm.prefill.task import PrefillTask


class Schedule(ABC):
    """An order in which the cache of a prompt is built."""

    name: ClassVar[str]
    #: Whether ``task.reader`` and ``task.writer`` are used; a schedule that says no must not be given them.
    reuses_prefix: ClassVar[bool] = False

    @abstractmethod
    def build(self, decoder: Decoder, token_ids: Tensor, task: PrefillTask) -> Construction:
        """Cache, hidden states and evidence from ids [B, S].

        Raises:
            Cancelled: within one chunk step of the caller's wish.
        """
