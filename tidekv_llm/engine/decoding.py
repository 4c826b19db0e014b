"""From a prompt's cache to text deltas: one request's decode loop, its clock and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tidekv_llm.decode.loop import decode_tokens
from tidekv_llm.decode.sampling import Sampler
from tidekv_llm.decode.text import TextStream
from tidekv_llm.engine.answers import Deltas, Generation
from tidekv_llm.engine.limits import memory_errors

if TYPE_CHECKING:
    from tidekv_llm.engine.weights import Hold, Weights
    from tidekv_llm.options import Settled
    from tidekv_llm.prefill.result import Prefilled
    from tidekv_llm.request import Request

_PROMPT_END_TOKENS = 32  # as many as a template needs to open a turn and its reasoning


def _text_stream(weights: Weights, ids: Tensor, stop: tuple[str, ...]) -> TextStream | None:
    tokenizer = weights.tokenizer
    if tokenizer is None:
        return None
    end = tokenizer.decode(ids[0, -_PROMPT_END_TOKENS:].tolist(), skip_special_tokens=False)
    return TextStream(tokenizer, stop, weights.reasoning_format, str(end))


class Decoding:
    """One generation. No lock and no grad mode is held across a yield.

    Args:
        hold: on the weights; letting it go ends the generation.
        ids: of the prompt, int64 [1, S].
        prefilled: the prompt; its cache grows by what is decoded.
        attention: backend choice.
        options: length, sampling and stops.
        request: progress, cancellation and timings.
    """

    def __init__(
        self, hold: Hold, ids: Tensor, prefilled: Prefilled, attention: str, options: Settled, request: Request
    ) -> None:
        weights = hold.get()
        self._hold, self._prefilled, self._options, self._request = hold, prefilled, options, request
        self._steps, note = weights.steps()
        self._row: Any = self._steps.row(prefilled.cache, weights.decoder.attention(attention))
        prefilled.metrics.notes += [note] if note else []
        self._text = _text_stream(weights, ids, options.stop)
        self._stop_ids = frozenset[int]() if options.ignore_eos else weights.stop_ids
        self._ids: list[int] = []
        self._stopped = False
        self._first_at = self._away = 0.0

    def run(self) -> Deltas[Generation]:
        """Yield text deltas, return the whole."""
        for token in self._tokens():
            self._ids.append(token)
            if self._text is None:
                continue
            if any(delta := self._text.push(token)):
                handed_out = time.perf_counter()
                yield delta
                self._away += time.perf_counter() - handed_out  # the reader's time is not decoding
            if self._text.stopped:
                self._stopped = True
                break
        self._stop_clock()
        if self._text is not None and any(delta := self._text.finish()):
            yield delta
        return self._generation()

    def _generation(self) -> Generation:
        text, reasoning = (self._text.text, self._text.reasoning) if self._text is not None else ("", "")
        if reasoning and not text and not self._stopped:
            self._prefilled.metrics.notes.append(
                "max_new_tokens was used up by reasoning, so there is no answer; raise it, or switch reasoning off "
                "with chat_template_kwargs={'enable_thinking': False} where the model's template knows that"
            )
        reason = "stop" if self._stopped else "length"
        return Generation(text, reasoning, self._ids, reason, self._prefilled.metrics)

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
            return self._steps.step([self._row], token_ids.tolist())

    def _start_clock(self) -> None:
        if not self._first_at:
            self._first_at = time.perf_counter()
            self._prefilled.metrics.ttft_seconds = self._first_at - self._request.started

    def _stop_clock(self) -> None:
        metrics, elapsed = self._prefilled.metrics, time.perf_counter() - self._first_at - self._away
        metrics.new_tokens = len(self._ids)
        if len(self._ids) > 1 and elapsed > 0:
            metrics.decode_tokens_per_second = (len(self._ids) - 1) / elapsed
