"""Two-pass blockwise scoring (paper, Algorithm 2 and Eqs. 4-7) and the streaming top-k.

Pass 1 scans the key blocks for the log-sum-exp of every observation query; pass 2 scans them again for
normalised weights. Neither stores more than one block: temporary memory is O(Hq * (W * block + K)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tidekv_llm.attention import mask_future_, softcap_
from tidekv_llm.cache.full_layer import FullLayer


def blocks(length: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges that cover ``length``: 10 by 4 gives (0, 4), (4, 8), (8, 10)."""
    for start in range(0, length, block_size):
        yield start, min(start + block_size, length)


def window_logits(layer: FullLayer, start: int, stop: int) -> Tensor:
    """Eq. 4 for keys [start, stop): float32 [B, Hkv, G * W, stop - start], minus infinity where not causal.

    The G query heads of a KV head are folded into the rows, so keys are not repeated.
    """
    batch, _, window, dim = layer.queries.shape
    folded = layer.queries.reshape(batch, layer.kv_heads, -1, dim)
    logits = torch.matmul(folded, layer.keys[:, :, start:stop].transpose(-1, -2)).float()
    softcap_(logits.mul_(layer.params.scaling), layer.params.softcap)
    shaped = logits.view(batch, layer.kv_heads, -1, window, stop - start)
    mask_future_(shaped, layer.prompt_length - window - start)
    return logits


def window_lse(layer: FullLayer, block_size: int) -> Tensor:
    """Pass 1 (Eqs. 5-6): float32 [B, Hkv, G * W] log-sum-exp over all causal keys, by a running maximum."""
    if layer.lse is not None:
        return layer.lse.reshape(layer.lse.shape[0], layer.kv_heads, -1)
    lse: Tensor | None = None
    for start, stop in blocks(layer.prompt_length, block_size):
        part = torch.logsumexp(window_logits(layer, start, stop), dim=-1)
        lse = part if lse is None else torch.logaddexp(lse, part)
    assert lse is not None
    return lse


def window_weights(layer: FullLayer, lse: Tensor, start: int, stop: int) -> Tensor:
    """Eq. 6's normalised weights a_{q,i}: float32 [B, Hkv, G, W, stop - start]."""
    weights = window_logits(layer, start, stop).sub_(lse.unsqueeze(-1)).exp_()
    return weights.view(*weights.shape[:2], layer.group_size, -1, stop - start)


def query_weights(window: int, weights: str, device: torch.device) -> Tensor:
    """Eq. 7's w_q of the observation queries: float32 [W], summing to 1.

    ``recency`` rises linearly: of 4 queries the weights are 0.1, 0.2, 0.3, 0.4.
    """
    raw = torch.ones(window, device=device)
    if weights == "recency":
        raw = torch.arange(1, window + 1, dtype=torch.float32, device=device)
    return raw / raw.sum()


def window_spread(layer: FullLayer, block_size: int) -> tuple[float, float]:
    """CAKE's two figures of the window's attention on the keys before it, blockwise.

    Returns:
        The entropy -sum a log a over queries, heads and keys, and the variance over the queries, summed over
        heads and keys (CAKE, arXiv 2503.12491, section 4.1; its code's ``torch.var`` with Bessel's correction).
    """
    lse, window = window_lse(layer, block_size), layer.queries.shape[2]
    spread = torch.zeros(2, dtype=torch.float64, device=layer.keys.device)
    for start, stop in blocks(layer.prompt_length - window, block_size):
        attention = window_weights(layer, lse, start, stop)  # [B, Hkv, G, W, n]
        spread[0] += torch.special.entr(attention).sum()
        if window > 1:
            spread[1] += attention.var(dim=3).sum()
    entropy, variance = spread.tolist()
    return entropy, variance


def pool(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Pool neighbouring scores along the last axis, stride 1, the width kept; [B, H, n] to [B, H, n]."""
    if pooling == "none" or kernel_size == 1:
        return scores
    half = kernel_size // 2
    if pooling in ("max", "passage"):
        return torch.nn.functional.max_pool1d(scores, kernel_size, stride=1, padding=half)
    return torch.nn.functional.avg_pool1d(scores, kernel_size, stride=1, padding=half)


class OnceEach:
    """Values along the last axis, each computed once while the ranges asked for move forward.

    Pooling and chunks give several keys one score, from values on both sides of a block's end. Computed again for
    the next block, a value could differ in its last bit: the tie between its keys would be broken, and where it is
    cut would depend on where blocks end.

    Args:
        compute: the values [..., stop - start] of a range.
    """

    def __init__(self, compute: Callable[[int, int], Tensor]) -> None:
        self._compute = compute
        self._start = 0
        self._known: Tensor | None = None

    def __call__(self, start: int, stop: int) -> Tensor:
        """Values [..., stop - start]; what lies before ``start`` is forgotten."""
        end = self._start + (0 if self._known is None else self._known.shape[-1])
        if self._known is None or not self._start <= start <= end <= stop:
            self._known = self._compute(start, stop)
        else:
            self._known = self._known[..., start - self._start :]
            if end < stop:
                self._known = torch.cat((self._known, self._compute(end, stop)), dim=-1)
        self._start = start
        return self._known


class StreamingTopK:
    """Keeps the k best (score, position) pairs of a stream of blocks, per row.

    Scores and positions share one 64-bit key, so ties always break towards the later position and the result
    does not depend on the block size.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._best: Tensor | None = None

    def push(self, scores: Tensor, start: int) -> None:
        """Offer float32 ``scores`` [..., n] of the positions start .. start + n - 1."""
        if self.k == 0:
            return
        keys = pack(scores, start)
        if self._best is not None:
            keys = torch.cat((self._best, keys), dim=-1)
        self._best = keys.topk(min(self.k, keys.shape[-1]), dim=-1, sorted=False).values

    def result(self) -> tuple[Tensor, Tensor]:
        """Positions int64 [..., k], ascending, and their scores float32 [..., k]."""
        assert self._best is not None
        positions, order = (self._best & 0xFFFFFFFF).sort(dim=-1)
        return positions, unpack_scores(self._best.gather(-1, order))


def pack(scores: Tensor, start: int) -> Tensor:
    """One int64 per score that sorts by (score, position)."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: the two are a tie
    # Negative floats sort backwards as integers: flip their magnitude bits.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    positions = torch.arange(start, start + scores.shape[-1], device=scores.device)
    return (ordered << 32) | positions


def unpack_scores(keys: Tensor) -> Tensor:
    """The float32 scores inside :func:`pack`'s keys."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
