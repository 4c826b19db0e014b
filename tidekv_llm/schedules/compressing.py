"""The user's own layer end: selector, budgets and layout of the options."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.hf import Decoder
from tidekv_llm.prefill.task import PrefillTask


def compressing(decoder: Decoder, token_ids: Tensor, task: PrefillTask, **changes: Any) -> Compressor:
    """A compressor for ids [B, S] with the task's options, some of them changed."""
    config = task.config.replace(**changes)
    return Compressor(config, decoder.num_layers, token_ids.shape[1], task.reserve, decoder.full_layers, task.passages)
