"""The decode loop: one token at a time through the model's layers, on storage that was reserved beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tidekv_llm.attention import AttentionDispatch, Scratch
from tidekv_llm.cache.compressed import CompressedCache
from tidekv_llm.hf import Decoder


class DecodeAdapter:
    """Feeds tokens at their true absolute positions, whatever the cache's physical length is."""

    def __init__(self, decoder: Decoder, cache: CompressedCache, attention: AttentionDispatch) -> None:
        self._decoder, self._cache = decoder, cache
        scratch = Scratch()
        for layer in cache.layers:
            layer.bind(attention, scratch)

    @torch.no_grad()
    def step(self, token_ids: Tensor) -> Tensor:
        """Append tokens int64 [B, C] and return the logits float32 [B, vocab] after the last of them."""
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
        return decoder.logits(hidden[:, -1])


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
