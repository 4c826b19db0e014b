"""Attention of one chunk of queries over all keys so far: one entry point, several backends.

``attend`` computes causal attention aligned to the bottom right: of ``keys`` with length L, the C queries are
the last C positions. No backend builds a ``[C, L]`` mask. Every backend returns ``(output, lse)``:

- ``tiled``: matrix products on cache-sized tiles with fixed scratch buffers, any device and dtype. The fastest on
  CPUs that multiply bfloat16 natively: a softmax over a tile in L2/L3 costs less than the fused kernel's small blocks.
- ``merge``: CPU, the fused flash kernel twice, history without a mask and the diagonal block with one, merged by
  their log-sum-exp. The fastest on all other CPUs.
- ``sdpa``: CUDA, PyTorch's flash or memory-efficient kernel with ``causal_lower_right``.
- ``flash``: FlashAttention-2 (extra ``flash``), aligned to the bottom right by itself.

The log-sum-exp of the observation window is pass 1 of Algorithm 2 (paper, Eqs. 5-6), so a backend that
returns it for nothing makes pass 1 free.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from tidekv_llm.errors import CacheError, ConfigError

_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# Bytes of one score tile. A tile must stay in the last-level cache, and the buffer is part of the construction
# peak. 4 MiB in bf16 holds, for a group of 3 query heads and 8,192 keys, tiles of 85 queries.
TILE_BYTES = 4 * 2**20
# Tile shapes come from a short list: queries per tile are a power of two where possible, and a tile's keys end at
# a multiple of KEY_STEP or at the chunk's end. oneDNN compiles and keeps a kernel for every new shape: with free
# shapes a prompt of 8,192 tokens compiled hundreds of them, and their code outweighed the active layer's KV.
KEY_STEP = 512


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer says about its attention.

    Attributes:
        scaling: factor on the logits, usually ``1/sqrt(head_dim)`` (Eq. 4).
        window: sliding window in tokens, the query's own position counted; None attends to everything.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        sinks: learned logits [heads] that take part in the softmax without a value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def softcap_(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)``, in place; None leaves them."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def mask_future_(logits: Tensor, own: int) -> None:
    """Set the keys that come after their query to minus infinity, in place.

    Args:
        logits: [..., C, L]; row r stands at key ``own + r``.
        own: the first row's own key; negative where all keys here come after it.

    Example: 2 rows, 4 keys and own 1: the first row loses the keys 2 and 3, the second key 3.
    """
    first, (rows, keys) = max(0, own + 1), logits.shape[-2:]
    if first < keys:
        row = torch.arange(own, own + rows, device=logits.device)
        key = torch.arange(first, keys, device=logits.device)
        logits[..., first:].masked_fill_(key[None, :] > row[:, None], -math.inf)


class Scratch:
    """Named buffers that are allocated once per request and handed out again as views.

    Temporaries whose size changes with every chunk fragment the heap and show up in the process peak; a fixed
    buffer is mapped once and goes back at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor, *, capacity: int = 0) -> Tensor:
        """A view of ``shape`` in the dtype and on the device of ``like``; its content is arbitrary.

        ``capacity`` (elements) is what the buffer is allocated with when it does not exist yet.
        """
        size = math.prod(shape)
        key = (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(max(size, capacity), dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Attention(Protocol):
    """A backend. Shapes: query [B, Hq, C, D], key and value [B, Hkv, L, D], L >= C."""

    name: str

    def supports(self, query: Tensor, params: AttentionParams) -> bool:
        """Whether this backend computes this exactly."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, scratch: Scratch, lse_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Output [B, C, Hq, D] and the float32 log-sum-exp [B, Hq, lse_rows] of the last ``lse_rows`` queries."""


class Attending(Protocol):
    """What attends by itself: a layer that knows all its keys and values, wherever they lie."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Attention output [B, C, Hq, D]."""


class BoundKeys(Tensor):
    """Keys of a layer that only its own ``attend`` can read: a handle that HF's code hands to our function.

    Any operation on them raises :class:`CacheError`, since they are a part of what the queries must see.
    """

    layer: Attending
    _harmless: ClassVar[frozenset[Any]] = frozenset(
        getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
    )

    @classmethod
    def of(cls, keys: Tensor, layer: Attending) -> BoundKeys:
        """The tensor as a handle of ``layer``."""
        bound = keys.as_subclass(cls)
        bound.layer = layer
        return bound

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in cls._harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CacheError(
            "a flattened or quantised cache needs our attention function; call generate() inside "
            "`with tidekv_attention(model):`"
        )


class TiledAttention:
    """Tiles of whole score rows: scores, one softmax, one product with the values.

    A tile has ``tile`` queries of one KV head's whole group, against every key they may see, so no online
    rescaling is needed and keys are never repeated for the group.
    """

    name = "tiled"

    def __init__(self, tile_bytes: int = TILE_BYTES) -> None:
        self.tile_bytes = tile_bytes

    def supports(self, query: Tensor, params: AttentionParams) -> bool:
        return True

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, scratch: Scratch, lse_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, count, _ = query.shape
        kv_heads, length, value_dim = value.shape[1:]
        group = heads // kv_heads
        out = scratch.take("attention_out", (batch, count, heads, value_dim), query)
        with_lse = count if params.sinks is not None else lse_rows
        lse = query.new_empty((batch, heads, with_lse), dtype=torch.float32)
        span = length if params.window is None else min(length, params.window + count)
        tile = self.tile_queries(group, span, count, query.element_size())
        for start in range(0, count, tile):
            stop = min(start + tile, count)
            rows = _TileRows(start, stop, length - count, length, params.window)
            for row in range(batch):
                for head in range(kv_heads):
                    group_heads = slice(head * group, (head + 1) * group)
                    scores = self._scores(query[row, group_heads, start:stop], key[row, head], params, rows, scratch)
                    self._keep_lse(lse[row, group_heads], scores, rows, count - with_lse)
                    torch.softmax(scores, dim=-1, out=scores)
                    result = scratch.take("tile_out", (scores.shape[0], value_dim), query)
                    torch.mm(scores, value[row, head, rows.first_key : rows.end_key], out=result)
                    out[row, start:stop, group_heads] = result.view(group, rows.count, value_dim).transpose(0, 1)
        if params.sinks is not None:
            apply_sinks(out, lse, params.sinks)
        return out, lse[:, :, with_lse - lse_rows :] if lse_rows else None

    def tile_queries(self, group: int, span: int, count: int, element_size: int) -> int:
        tile = self.tile_bytes // (group * span * element_size)
        power = 1 << max(0, tile.bit_length() - 1)
        return max(1, min(power, count))

    def _scores(self, query: Tensor, key: Tensor, params: AttentionParams, rows: _TileRows, scratch: Scratch) -> Tensor:
        group, count, dim = query.shape
        keys = key[rows.first_key : rows.end_key]
        folded = scratch.take("tile_query", (group * count, dim), query)
        folded.view(group, count, dim).copy_(query)
        capacity = self.tile_bytes // query.element_size()
        scores = scratch.take("tile_scores", (group * count, keys.shape[0]), query, capacity=capacity)
        torch.addmm(scores, folded, keys.t(), beta=0, alpha=params.scaling, out=scores)
        softcap_(scores, params.softcap)
        rows.mask_(scores.view(group, count, -1))
        return scores

    @staticmethod
    def _keep_lse(lse: Tensor, scores: Tensor, rows: _TileRows, first_row: int) -> None:
        # lse holds the rows from first_row on; this tile has the rows [rows.start, rows.stop).
        begin = max(rows.start, first_row)
        if begin < rows.stop:
            tile = scores.view(lse.shape[0], rows.count, -1)[:, begin - rows.start :]
            lse[:, begin - first_row : rows.stop - first_row] = torch.logsumexp(tile.float(), dim=-1)


@dataclass(frozen=True, slots=True)
class _TileRows:
    """Query rows [start, stop) of a chunk that begins at key position ``offset``, and the keys they may see.

    Example: offset 8, rows 2..4 with window 4: positions 10 and 11 see keys 7..10 and 8..11, so the tile spans
    keys 7..11 at least; key 11 is masked for the first row and key 7 for the second.
    """

    start: int
    stop: int
    offset: int
    length: int
    window: int | None

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def end_key(self) -> int:
        return min(-(-(self.offset + self.stop) // KEY_STEP) * KEY_STEP, self.length)

    @property
    def first_key(self) -> int:
        return 0 if self.window is None else max(0, self._oldest)

    @property
    def _oldest(self) -> int:
        """Oldest key of the first row if keys went back without end (it can be negative)."""
        assert self.window is not None
        return self.offset + self.start - self.window + 1

    def mask_(self, scores: Tensor) -> None:
        """Set what a row must not see to minus infinity, in place; scores [group, count, keys]."""
        mask_future_(scores, self.offset + self.start - self.first_key)
        if self.window is not None:
            row = torch.arange(self.count, device=scores.device)
            oldest = self._oldest - self.first_key
            column = torch.arange(min(max(0, oldest + self.count), scores.shape[-1]), device=scores.device)
            scores[..., : len(column)].masked_fill_(column[None, :] < row[:, None] + oldest, -math.inf)


class MergeAttention:
    """CPU: the fused kernel on the history and on the diagonal block, merged by log-sum-exp."""

    name = "merge"

    def supports(self, query: Tensor, params: AttentionParams) -> bool:
        return query.device.type == "cpu" and params.window is None and params.softcap is None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, scratch: Scratch, lse_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, count, _ = query.shape
        history, groups = key.shape[2] - count, (key.shape[1], heads // key.shape[1])
        out = scratch.take("attention_out", (batch, count, heads, value.shape[-1]), query)
        lse = query.new_empty((batch, heads, count), dtype=torch.float32)
        # [B, Hkv, group, C, Dv] and [B, Hkv, group, C]
        grouped, grouped_lse = out.transpose(1, 2).unflatten(1, groups), lse.unflatten(1, groups)
        queries = query.unflatten(1, groups)
        self._diagonal(queries, key[:, :, history:], value[:, :, history:], params.scaling, grouped, grouped_lse)
        if history:
            past, past_lse = self._history(queries, key[:, :, :history], value[:, :, :history], params.scaling, scratch)
            total = torch.logaddexp(grouped_lse, past_lse)
            grouped.mul_(grouped_lse.sub_(total).exp_().unsqueeze(-1))
            grouped.add_(past.mul_(past_lse.sub_(total).exp_().unsqueeze(-1)))
            lse = total.flatten(1, 2)
        if params.sinks is not None:
            apply_sinks(out, lse, params.sinks)
        return out, lse[:, :, -lse_rows:] if lse_rows else None

    @staticmethod
    def _diagonal(query: Tensor, key: Tensor, value: Tensor, scaling: float, out: Tensor, lse: Tensor) -> None:
        # One query head of every group at a time: keys are not repeated for the group.
        for member in range(query.shape[2]):
            part, part_lse = _FLASH_ON_CPU(query[:, :, member], key, value, is_causal=True, scale=scaling)
            out[:, :, member] = part
            lse[:, :, member] = part_lse

    @staticmethod
    def _history(query: Tensor, key: Tensor, value: Tensor, scaling: float, scratch: Scratch) -> tuple[Tensor, Tensor]:
        # Without a mask the group's heads can be folded into the sequence axis: more rows for each block of keys.
        rows = query.shape[2:4]
        folded = scratch.take("folded_query", (*query.shape[:2], rows.numel(), query.shape[-1]), query)
        folded.unflatten(2, rows).copy_(query)
        out, lse = _FLASH_ON_CPU(folded, key, value, scale=scaling)
        return out.unflatten(2, rows), lse.unflatten(2, rows)


class SdpaAttention:
    """CUDA: PyTorch's fused kernels, aligned to the bottom right without a mask tensor."""

    name = "sdpa"

    def supports(self, query: Tensor, params: AttentionParams) -> bool:
        plain = params.window is None and params.softcap is None and params.sinks is None
        return query.device.type == "cuda" and plain

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, scratch: Scratch, lse_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(query.shape[2], key.shape[2]) if query.shape[2] > 1 else None
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=params.scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2), None


class FlashAttention:
    """FlashAttention-2, the paper's main path."""

    name = "flash"

    def supports(self, query: Tensor, params: AttentionParams) -> bool:
        return flash_attn_takes(query)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, scratch: Scratch, lse_rows: int
    ) -> tuple[Tensor, Tensor | None]:
        from flash_attn import flash_attn_func

        with_lse = lse_rows > 0 or params.sinks is not None
        result = flash_attn_func(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=params.scaling,
            causal=True,
            # (left, right): a window of w tokens, the own position counted, looks back w - 1.
            window_size=(-1, -1) if params.window is None else (params.window - 1, 0),
            softcap=params.softcap or 0.0,
            return_attn_probs=with_lse,
        )
        if not with_lse:
            return result, None
        out, lse = result[0], result[1]
        if params.sinks is not None:
            apply_sinks(out, lse, params.sinks)
        return out, lse[:, :, -lse_rows:] if lse_rows else None


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add a logit without a value to the softmax: out *= e^lse / (e^lse + e^sink); out [B, C, H, D]."""
    share = torch.sigmoid(lse - sinks.float()[None, :, None])  # [B, H, C]
    out.mul_(share.transpose(1, 2).unsqueeze(-1).to(out.dtype))


def flash_attn_takes(query: Tensor) -> bool:
    """Whether FlashAttention's kernels can run on such queries [..., D] here."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and half and query.shape[-1] <= 256 and flash_attn_available()


@functools.cache
def flash_attn_available() -> bool:
    """Whether the ``flash-attn`` package can be imported; looked up once, it is asked in every layer's step."""
    return importlib.util.find_spec("flash_attn") is not None


BACKENDS: dict[str, type[TiledAttention | MergeAttention | SdpaAttention | FlashAttention]] = {
    backend.name: backend for backend in (FlashAttention, SdpaAttention, TiledAttention, MergeAttention)
}


class AttentionDispatch:
    """Chooses a backend per call: the forced one, or of those that support it the one that is fastest here.

    Args:
        name: a backend's, or ``"auto"``.
        tiles: with ``"auto"``, a CPU computes tiles instead of using the fused kernel
            (:func:`tidekv_llm.hardware.prefers_tiles`).
    """

    def __init__(self, name: str = "auto", *, tiles: bool = False) -> None:
        if name != "auto" and name not in BACKENDS:
            raise ConfigError(f"attention={name!r} is unknown; choose one of auto, {', '.join(BACKENDS)}")
        names = ("flash", "sdpa", "merge", "tiled") if name == "auto" else (name,)
        self.backends: list[Attention] = [BACKENDS[each]() for each in names]
        self._tiles = tiles and name == "auto"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        params: AttentionParams,
        scratch: Scratch,
        lse_rows: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Causal attention of a chunk.

        Args:
            query: [B, Hq, C, D], the last C positions of ``key``.
            key: [B, Hkv, L, D].
            value: [B, Hkv, L, Dv].
            params: scaling, window, softcap and sinks of the layer.
            scratch: where temporaries live; the output may be a view of it, valid until the next call.
            lse_rows: for how many of the last queries the log-sum-exp is wanted.

        Returns:
            Output [B, C, Hq, Dv] and the log-sum-exp [B, Hq, lse_rows] in float32, or None where the kernel
            does not give it (the caller then computes it blockwise).

        Raises:
            ConfigError: a forced backend cannot compute this.
        """
        tiles = self._tiles and query.device.type == "cpu"
        for backend in self.backends[-1:] if tiles else self.backends:
            if backend.supports(query, params):
                return backend(query, key, value, params, scratch, lse_rows)
        raise ConfigError(
            f"attention={self.backends[0].name!r} cannot run on {query.device.type} in {query.dtype} "
            f"with window={params.window} and softcap={params.softcap}; use attention='auto'"
        )
