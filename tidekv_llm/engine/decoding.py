"""From a prompt's cache to text deltas: one request's decode loop, its clock and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tidekv_llm.decode.drafts import Drafts
from tidekv_llm.decode.reasoning import Delta
from tidekv_llm.decode.sampling import Sampler
from tidekv_llm.decode.text import TextStream
from tidekv_llm.engine.answers import Deltas, Generation, TokenLogprob
from tidekv_llm.engine.limits import memory_errors

if TYPE_CHECKING:
    from tidekv_llm.engine.weights import Hold, Weights
    from tidekv_llm.metrics import Metrics
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

    Between two steps it says which tokens it wants to have run (:meth:`wanted`), and is given the logits after each
    of them (:meth:`feed`); :meth:`run` does both for a generation on its own.

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
        self.hold, self._prefilled, self._options, self._request = hold, prefilled, options, request
        self.steps, note = weights.steps()
        self.row: Any = self.steps.row(prefilled.cache, weights.decoder.attention(attention))
        prefilled.metrics.notes += [note] if note else []
        self._text = _text_stream(weights, ids, options.stop)
        self._stop_ids = frozenset[int]() if options.ignore_eos else weights.stop_ids
        self._sampler = Sampler(options.sampling)
        self._drafts = Drafts(ids[0].tolist(), options.drafts) if options.drafts else None
        self._drafted: list[int] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._stopped = False
        self._first_at = self._away = 0.0

    def run(self) -> Deltas[Generation]:
        """Yield text deltas, return the whole."""
        deltas = self.start()
        while True:
            for delta in deltas:
                handed_out = time.perf_counter()
                yield delta
                self._away += time.perf_counter() - handed_out  # the reader's time is not decoding
            if self.done:
                break
            deltas = self.feed(step_together([self], [self.wanted()], self._request.cancel))
        self._stop_clock()
        if self._text is not None and any(delta := self._text.finish()):
            yield delta
        return self._generation()

    def finish(self) -> Generation:
        """The whole, for whoever wants no deltas; once it is :attr:`done`."""
        self._stop_clock()
        if self._text is not None:
            self._text.finish()
        return self._generation()

    @property
    def metrics(self) -> Metrics:
        """Figures so far."""
        return self._prefilled.metrics

    @property
    def done(self) -> bool:
        """Whether no step is needed any more."""
        return self._stopped or len(self._ids) >= self._options.max_new_tokens

    def start(self) -> list[Delta]:
        """The first token, from the prefill's logits."""
        return self.feed(self._prefilled.logits[None])

    def wanted(self) -> list[int]:
        """Tokens to run next: the last one, and those that may follow it.

        Raises:
            Cancelled: the caller's wish.
        """
        self._request.check_cancelled()
        if self._drafts is not None:
            self._drafted = self._drafts.propose(self._options.max_new_tokens - len(self._ids) - 1)
        return [self._ids[-1], *self._drafted]

    def feed(self, logits: Tensor) -> list[Delta]:
        """Take in the logits [T, vocab] after each wanted token; return the text deltas of what is said now.

        Every token is drawn from the model's own logits, drafted or not: a draft is right if it is what was drawn.
        That is the rejection rule for a draft that is certain, so the distribution is the model's, and a seed gives
        the same text with and without drafts.
        """
        deltas, accepted = list[Delta](), 0
        for row, draft in zip(logits, [*self._drafted, None], strict=True):
            token = self._sampler(row)
            deltas += self._take(token)
            self._note_logprob(row)
            if self.done or token != draft:
                break
            accepted += 1
        self._settle_drafts(accepted)
        return deltas

    def _settle_drafts(self, accepted: int) -> None:
        drafted, self._drafted = len(self._drafted), []
        self._prefilled.cache.rollback(drafted - accepted)
        if self._drafts is not None:
            self._drafts.judge(drafted, accepted)
        metrics = self._prefilled.metrics
        metrics.drafted_tokens += drafted
        metrics.accepted_tokens += accepted

    def _note_logprob(self, logits: Tensor) -> None:
        """How likely the token was that was just taken, if that is asked for and it is no end of sequence."""
        if self._options.logprobs is not None and len(self._logprobs) < len(self._ids):
            logprobs, token = logits.log_softmax(-1), self._ids[-1]
            best = logprobs.topk(min(self._options.logprobs, logits.shape[-1]))
            pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self._logprobs.append(TokenLogprob(token, float(logprobs[token]), pairs))

    def _take(self, token: int) -> list[Delta]:
        """One token more, or the end of sequence, which is not among the tokens."""
        self._start_clock()
        if token in self._stop_ids:
            self._stopped = True
            return []
        self._ids.append(token)
        if self._drafts is not None:
            self._drafts.push(token)
        if self._text is None:
            return []
        delta = self._text.push(token)
        self._stopped = self._text.stopped
        return [delta] if any(delta) else []

    def _generation(self) -> Generation:
        text, reasoning = (self._text.text, self._text.reasoning) if self._text is not None else ("", "")
        if reasoning and not text and not self._stopped:
            self._prefilled.metrics.notes.append(
                "max_new_tokens was used up by reasoning, so there is no answer; raise it, or switch reasoning off "
                "with chat_template_kwargs={'enable_thinking': False} where the model's template knows that"
            )
        reason = "stop" if self._stopped else "length"
        return Generation(text, reasoning, self._ids, reason, self._prefilled.metrics, tuple(self._logprobs))

    def _start_clock(self) -> None:
        if not self._first_at:
            self._first_at = time.perf_counter()
            self._prefilled.metrics.ttft_seconds = self._first_at - self._request.started

    def _stop_clock(self) -> None:
        metrics, elapsed = self._prefilled.metrics, time.perf_counter() - self._first_at - self._away
        metrics.new_tokens = len(self._ids)
        if len(self._ids) > 1 and elapsed > 0:
            metrics.decode_tokens_per_second = (len(self._ids) - 1) / elapsed


def step_together(
    decodings: Sequence[Decoding], tokens: Sequence[Sequence[int]], cancel: threading.Event | None = None
) -> Tensor:
    """One step for the tokens that several generations of the same weights want: logits [T, vocab], one after another.

    Raises:
        Cancelled: ``cancel`` was set before it was these generations' turn at the model.
        MemoryLimitError: there is no memory for it; none of these generations can go on.
    """
    first = decodings[0]
    with first.hold.get().lock.hold(cancel), memory_errors("decoding"):
        for decoding in decodings:
            decoding.metrics.decode_steps += 1
        logits: Tensor = first.steps.step([decoding.row for decoding in decodings], tokens)
        return logits
