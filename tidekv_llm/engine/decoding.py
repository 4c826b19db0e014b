"""From a prompt's cache to text deltas: one request's decode loop, its clock and its end."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.decode.loop import DecodeAdapter, decode_tokens
from tidekv_llm.decode.sampling import Sampler
from tidekv_llm.decode.text import TextStream
from tidekv_llm.engine.answers import Generation
from tidekv_llm.engine.limits import memory_errors

if TYPE_CHECKING:
    from tidekv_llm.engine.weights import Hold
    from tidekv_llm.options import Settled
    from tidekv_llm.prefill.result import Prefilled
    from tidekv_llm.request import Request


class Decoding:
    """One generation. No lock and no grad mode is held across a yield.

    Args:
        hold: on the weights; letting it go ends the generation.
        prefilled: the prompt; its cache grows by what is decoded.
        attention: backend choice.
        options: length, sampling and stops.
        request: progress, cancellation and timings.
    """

    def __init__(self, hold: Hold, prefilled: Prefilled, attention: str, options: Settled, request: Request) -> None:
        weights = hold.get()
        self._hold, self._prefilled, self._options, self._request = hold, prefilled, options, request
        self._adapter = DecodeAdapter(weights.decoder, prefilled.cache, AttentionDispatch(attention))
        self._text = TextStream(weights.tokenizer, options.stop) if weights.tokenizer is not None else None
        self._stop_ids = frozenset[int]() if options.ignore_eos else weights.stop_ids
        self._ids: list[int] = []
        self._stopped = False
        self._first_at = self._away = 0.0

    def run(self) -> Generator[str, None, Generation]:
        """Yield text deltas, return the whole."""
        for token in self._tokens():
            self._ids.append(token)
            if self._text is None:
                continue
            if delta := self._text.push(token):
                handed_out = time.perf_counter()
                yield delta
                self._away += time.perf_counter() - handed_out  # the reader's time is not decoding
            if self._text.stopped:
                self._stopped = True
                break
        self._stop_clock()
        if self._text is not None and (delta := self._text.finish()):
            yield delta
        text, finish_reason = self._text.text if self._text is not None else "", "stop" if self._stopped else "length"
        return Generation(text, self._ids, finish_reason, self._prefilled.metrics)

    def _tokens(self) -> Iterator[int]:
        """Sampled ids up to the end of sequence, which is not among them."""
        sampler, most = Sampler(self._options.sampling), self._options.max_new_tokens
        for token in decode_tokens(self._step, self._prefilled.logits, sampler, max_new_tokens=most):
            self._start_clock()
            if token in self._stop_ids:
                self._stopped = True
                return
            yield token

    def _step(self, token_ids: Tensor) -> Tensor:
        self._request.check_cancelled()
        with self._hold.get().lock.hold(self._request.cancel), memory_errors("decoding"):
            return self._adapter.step(token_ids)

    def _start_clock(self) -> None:
        if not self._first_at:
            self._first_at = time.perf_counter()
            self._prefilled.metrics.ttft_seconds = self._first_at - self._request.started

    def _stop_clock(self) -> None:
        metrics, elapsed = self._prefilled.metrics, time.perf_counter() - self._first_at - self._away
        metrics.new_tokens = len(self._ids)
        if len(self._ids) > 1 and elapsed > 0:
            metrics.decode_tokens_per_second = (len(self._ids) - 1) / elapsed
