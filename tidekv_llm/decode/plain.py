"""The decode step of plain layers: arithmetic on tokens of one or several answers, without the model's own code.

    tokens -> embedding -> layers, linear maps once for all tokens, attention per answer -> logits

What does not depend on the token is made beforehand: the layers as arithmetic when the model is loaded, the rotary
tables for the positions of a whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.decode.loop import bind
from tidekv_llm.hf import Decoder
from tidekv_llm.layers import PlainLayer, plain_layers
from tidekv_llm.products import streams, without_onednn

# Positions that rotary tables are made for at once.
TABLE_POSITIONS = 256


@dataclass(eq=False)
class Row:
    """One answer that is being decoded.

    Attributes:
        cache: the prompt's; it grows by what is decoded.
        first: position that the tables begin at.
        tables: per layer, cosines and sines [positions, 1, D] from ``first`` on; None without positions.
    """

    cache: CompressedCache
    first: int = 0
    tables: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)


class PlainDecoder:
    """Steps of a model with plain layers.

    Args:
        decoder: the model: embedding, tables and logits.
        alone: whether nothing else computes in this process (:class:`~tidekv_llm.products.Product`).

    Raises:
        NotPlainError: its layers are not plain.
    """

    def __init__(self, decoder: Decoder, alone: Callable[[], bool] = lambda: True) -> None:
        self.decoder, self.layers = decoder, plain_layers(decoder, alone)
        self._alone, self._head_streams = alone, streams(decoder.head)

    def row(self, cache: CompressedCache, attention: AttentionDispatch) -> Row:
        """A prompt's cache, ready for its answer."""
        bind(cache, attention)
        return Row(cache)

    @torch.no_grad()
    def step(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append to each row its tokens, one or several; return the logits float32 [T, vocab] after each of them.

        Example: rows that get 1 and 3 tokens: T = 4, the first row's logits come first.
        """
        counts = [len(each) for each in tokens]
        ids = torch.tensor([[token for each in tokens for token in each]])
        hidden = self.decoder.embed(ids)[0]  # [T, d_model]
        tables = self._tables(rows, counts, hidden)
        for index, layer in enumerate(self.layers):
            attending = _Attending(layer, rows, counts, index)
            hidden = layer(hidden, tables[index], attending)
        if self._head_streams and hidden.shape[0] == 1 and self._alone():
            return without_onednn(lambda: self.decoder.logits(hidden))
        return self.decoder.logits(hidden)

    def _tables(self, rows: Sequence[Row], counts: Sequence[int], hidden: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """The tables of every layer at the rows' next positions; layers that share them share the tensors."""
        parts = []
        for row, count in zip(rows, counts, strict=True):
            start = row.cache.layer(0).logical
            if not row.tables or start < row.first or start + count > row.first + TABLE_POSITIONS:
                row.first, row.tables = start, self._fresh_tables(start, max(count, TABLE_POSITIONS), hidden)
            parts.append((row.tables, slice(start - row.first, start - row.first + count)))
        return _cut(parts)

    def _fresh_tables(self, start: int, count: int, hidden: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        decoder, made = self.decoder, dict[tuple[str, int], tuple[Tensor, Tensor]]()
        positions = torch.arange(start, start + count, device=hidden.device)
        found: list[tuple[Tensor, Tensor] | None] = []
        for index, layer in enumerate(self.layers):
            if layer.rotation is None:
                found.append(None)
                continue
            kind = (decoder.layer_types[index], id(layer.rotation))
            if kind not in made:
                cos, sin = decoder.position_embeddings(hidden[None], positions, start + count - 1, index)
                made[kind] = layer.rotation.tables(cos[0], sin[0])
            found.append(made[kind])
        return found


def _cut(
    parts: Sequence[tuple[Sequence[tuple[Tensor, Tensor] | None], slice]],
) -> list[tuple[Tensor, Tensor] | None]:
    """Every layer's tables at the slices, row after row; what is the same in two layers is cut once."""
    cut: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    found: list[tuple[Tensor, Tensor] | None] = []
    for layer in zip(*(tables for tables, _ in parts), strict=True):
        pairs = [(pair, where) for pair, (_, where) in zip(layer, parts, strict=True) if pair is not None]
        key = tuple(id(pair) for pair, _ in pairs)
        if pairs and key not in cut:
            cosines, sines = ([pair[part][where] for pair, where in pairs] for part in (0, 1))
            cut[key] = (cosines[0], sines[0]) if len(pairs) == 1 else (torch.cat(cosines), torch.cat(sines))
        found.append(cut.get(key))
    return found


@dataclass(frozen=True, slots=True)
class _Attending:
    """A layer's attention for the tokens of all rows: each row has its own past."""

    layer: PlainLayer
    rows: Sequence[Row]
    counts: Sequence[int]
    index: int

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts, start = [], 0
        for row, count in zip(self.rows, self.counts, strict=True):
            here = slice(start, start + count)
            query, key, value = (each[here].transpose(0, 1)[None] for each in (queries, keys, values))
            out = row.cache.layer(self.index).step(query, key, value, self.layer.params)  # [1, C, Hq, Dv]
            parts.append(out.reshape(count, -1))
            start += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)
