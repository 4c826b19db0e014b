"""What one prefill is given besides the model and the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tidekv_llm.config import PrefillConfig
from tidekv_llm.memory import MemoryMeter
from tidekv_llm.passages import Passages
from tidekv_llm.prefill.prefix import PrefixReader, PrefixWriter
from tidekv_llm.request import Request


@dataclass(frozen=True)
class PrefillTask:
    """One prompt's prefill, whatever the schedule.

    Attributes:
        config: the user's options; its chunk size is a number here.
        request: progress, cancellation and timings.
        meter: told the bytes of each component.
        reserve: slots for decoded tokens in every layer's storage.
        boundaries: positions where a chunk must end: the ends of the documents.
        reader: keys and values of the first ``reused`` positions, or None.
        reused: prompt positions that need not be computed.
        writer: takes the keys and values of the first positions while they pass by, or None.
        all_outputs: also compute the last layer's hidden states that the next token does not need (to measure
            fidelity).
        passages: lines and sentences of the prompt, where its text is known and the options ask for them.
    """

    config: PrefillConfig
    request: Request
    meter: MemoryMeter
    reserve: int = 0
    boundaries: tuple[int, ...] = ()
    reader: PrefixReader | None = None
    reused: int = 0
    writer: PrefixWriter | None = None
    all_outputs: bool = False
    passages: Passages | None = None

    def with_options(self, **changes: Any) -> PrefillTask:
        """The same task with some of the config's options changed."""
        return replace(self, config=self.config.replace(**changes))
