"""KeyDiff: keys that differ most from the average key stay (arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.compress.layer import FullLayer
from tidekv_llm.compress.scoring import blocks
from tidekv_llm.compress.selectors.base import Scorer, Selector


@dataclass(frozen=True)
class KeyDiff(Selector):
    """-cos(k_i, mean over all positions of the unit-normalised rotated keys), per KV head.

    Looks at no query. Deviation, on purpose: window and sinks are mandatory, as for every selector here.
    """

    name: ClassVar[str] = "keydiff"

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        total = layer.keys.new_zeros((*layer.keys.shape[:2], layer.keys.shape[3]), dtype=torch.float32)
        for start, stop in blocks(layer.prompt_length, block_size):
            total += _unit(layer.keys[:, :, start:stop]).sum(dim=2)
        anchor = _unit(total).unsqueeze(-1)  # [B, Hkv, D, 1]; the length of the mean does not matter

        def scores(start: int, stop: int) -> Tensor:
            return -(_unit(layer.keys[:, :, start:stop]) @ anchor).squeeze(-1)

        return scores


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors.float(), dim=-1)
