"""KeyDiff: keys that differ most from the average key stay (arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tidekv_llm.cache.full_layer import FullLayer
from tidekv_llm.compress.scoring import blocks
from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector
from tidekv_llm.config import whole_number
from tidekv_llm.errors import ConfigError

# Keys summed at once for an anchor: a fixed number, so that scores do not depend on the block size.
ANCHOR_BLOCK = 512
# Two keys are equally far from their mean: shorter segments would rank rounding errors.
LEAST_SEGMENT = 16


@register_selector
@dataclass(frozen=True)
class KeyDiff(Selector):
    """-cos(k_i, mean of the unit-normalised rotated keys around it), mean over the KV heads. Looks at no query.

    Deviations, on purpose. The mean is that of the key's own segment: rotated keys turn with their position, so
    those in the middle of a long prompt are close to the mean of all of it whatever they say, and a fact there was
    evicted. All heads of a layer keep the same tokens: a number whose digits stay in different heads is in none.
    And window and sinks are mandatory, as for every selector here. ``KeyDiff(segment_length=None,
    share_heads=False)`` is the paper's.

    Args:
        segment_length: about how many tokens share an anchor: a prompt is cut into round(S / segment_length) equal
            segments, at least one; None for one anchor.
        share_heads: whether a layer's heads go by their mean score. With ``head_budget="ada"`` they then get equal
            budgets.

    Raises:
        ConfigError: ``segment_length`` is not a whole number of at least 16, or ``share_heads`` no bool.
    """

    name: ClassVar[str] = "keydiff"

    segment_length: int | None = 512
    share_heads: bool = True

    def __post_init__(self) -> None:
        if self.segment_length is not None:
            whole_number("segment_length", self.segment_length, least=LEAST_SEGMENT)
        if not isinstance(self.share_heads, bool):
            raise ConfigError(f"share_heads={self.share_heads!r} must be True or False")

    def scorer(self, layer: FullLayer, block_size: int) -> Scorer:
        length = layer.prompt_length
        segments = max(1, round(length / self.segment_length)) if self.segment_length else 1
        in_use, anchor = -1, layer.keys.new_empty(0)  # of one segment: blocks come in order

        def scores(start: int, stop: int) -> Tensor:
            nonlocal in_use, anchor
            parts = []
            for segment in range(_segment_of(start, segments, length), _segment_of(stop - 1, segments, length) + 1):
                first, last = _span(segment, segments, length)
                if segment != in_use:
                    in_use, anchor = segment, _anchor(layer.keys, first, last)
                unit = _unit(layer.keys[:, :, max(start, first) : min(stop, last)])
                parts.append(-(unit @ anchor).squeeze(-1))
            found = torch.cat(parts, dim=-1)  # [B, Hkv, n]
            return found.mean(dim=1, keepdim=True).expand_as(found) if self.share_heads else found

        return scores


def _span(segment: int, segments: int, length: int) -> tuple[int, int]:
    """Range of one of ``segments`` equal parts: 10 tokens in 3 give (0, 3), (3, 6), (6, 10)."""
    return segment * length // segments, (segment + 1) * length // segments


def _segment_of(position: int, segments: int, length: int) -> int:
    """The part that a position lies in; the inverse of :func:`_span`."""
    return ((position + 1) * segments - 1) // length


def _anchor(keys: Tensor, first: int, last: int) -> Tensor:
    """Direction of the mean unit key of a range: float32 [B, Hkv, D, 1]."""
    total = keys.new_zeros((*keys.shape[:2], keys.shape[3]), dtype=torch.float32)
    for start, stop in blocks(last - first, ANCHOR_BLOCK):
        total += _unit(keys[:, :, first + start : first + stop]).sum(dim=2)
    return _unit(total).unsqueeze(-1)  # the length of the mean does not matter


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors.float(), dim=-1)
