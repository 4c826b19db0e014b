"""The decode step: tokens through the model's layers, on storage that was reserved beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionDispatch, Scratch
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder


class DecodeAdapter:
    """Feeds tokens at their true absolute positions, whatever the cache's physical length is.

    It calls transformers' own layers: right for every family. :mod:`tidekv_llm.decode.plain` is the quick way.
    """

    def __init__(self, decoder: Decoder, cache: CompressedCache, attention: AttentionDispatch) -> None:
        self._decoder, self._cache = decoder, cache
        bind(cache, attention)

    def step(self, token_ids: Tensor) -> Tensor:
        """Append tokens int64 [B, C] and return the logits float32 [B, vocab] after the last of them."""
        return self._logits(token_ids, last_only=True)

    def verify(self, token_ids: Tensor) -> Tensor:
        """Append tokens int64 [1, C] and return the logits float32 [C, vocab] after each of them."""
        return self._logits(token_ids, last_only=False)

    @torch.no_grad()
    def _logits(self, token_ids: Tensor, *, last_only: bool) -> Tensor:
        decoder = self._decoder
        first = self._cache.layer(0).logical
        last = first + token_ids.shape[1] - 1
        hidden = decoder.embed(token_ids)
        positions = torch.arange(first, last + 1, device=hidden.device)
        tables = {}
        for index in range(decoder.num_layers):
            kind = decoder.layer_types[index]
            if kind not in tables:
                tables[kind] = decoder.position_embeddings(hidden, positions, last, index)
            hidden = decoder.run_layer(index, hidden, positions, tables[kind], self._cache.layer(index))
        return decoder.logits(hidden[:, -1] if last_only else hidden[0])


def bind(cache: CompressedCache, attention: AttentionDispatch) -> None:
    """Give every layer what it computes its attention with."""
    scratch = Scratch()
    for layer in cache.layers:
        layer.bind(attention, scratch)


class LayerByLayer:
    """Steps through transformers' own layers, one answer after another."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def row(self, cache: CompressedCache, attention: AttentionDispatch) -> DecodeAdapter:
        """A prompt's cache, ready for its answer."""
        return DecodeAdapter(self._decoder, cache, attention)

    def step(self, rows: Sequence[DecodeAdapter], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append to each row its tokens; return the logits float32 [T, vocab] after each of them, row after row."""
        return torch.cat([row.verify(torch.tensor([list(ids)])) for row, ids in zip(rows, tokens, strict=True)])


def decode_tokens(
    step: Callable[[Tensor], Tensor], logits: Tensor, sample: Callable[[Tensor], int], *, max_new_tokens: int
) -> Iterator[int]:
    """Yield up to ``max_new_tokens`` token ids; the first comes from the prefill's ``logits`` [vocab].

    ``step`` takes ids [1, 1] and returns logits [1, vocab]. None runs for a token that nobody asks for: the one
    after the last is never computed.
    """
    token = sample(logits)
    yield token
    for _ in range(max_new_tokens - 1):
        token = sample(step(torch.tensor([[token]]))[0])
        yield token
