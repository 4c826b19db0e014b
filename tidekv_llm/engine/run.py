"""A run: weights, config and window, and the path from token ids to an answer.

    prefill (with or without a stored prefix) -> decode -> text deltas -> an answer with its pages

:class:`TideKV` and :class:`Session` both build one, and it knows neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidekv_llm.compress.selectors import make_selector
from tidekv_llm.config import AUTO_CHUNK, PrefillConfig
from tidekv_llm.documents import Document, Prompt, cite_pages, document_ends
from tidekv_llm.engine.answers import Answer, Deltas, Generation
from tidekv_llm.engine.decoding import Decoding
from tidekv_llm.engine.limits import check_exact_length, check_ids, check_window, memory_errors
from tidekv_llm.errors import CacheError
from tidekv_llm.evidence import kept_per_page
from tidekv_llm.memory import MemoryMeter, MemoryReport
from tidekv_llm.metrics import Metrics
from tidekv_llm.passages import Passages
from tidekv_llm.planner import choose_chunk_size, require_memory
from tidekv_llm.prefill.result import Prefilled
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.prefixes.filling import Filling
from tidekv_llm.prefixes.plan import PrefixCache, PromptIdentity, ReusePlan
from tidekv_llm.request import Request
from tidekv_llm.schedules import make_schedule

if TYPE_CHECKING:
    from tidekv_llm.engine.weights import Hold
    from tidekv_llm.options import Settled


@dataclass(frozen=True)
class RunInput:
    """One prompt to run.

    Attributes:
        ids: int64 [1, S].
        request: progress, cancellation and timings.
        boundaries: positions where a chunk must end: the ends of the documents.
        reserve: room for this many decoded tokens.
        all_outputs: compute the last layer's hidden states of all positions.
        prefix: knows stored prefixes; None for none.
    """

    ids: Tensor
    request: Request = field(default_factory=Request)
    boundaries: tuple[int, ...] = ()
    reserve: int = 0
    all_outputs: bool = False
    prefix: PrefixCache | None = None

    @property
    def length(self) -> int:
        """S, tokens of the prompt."""
        return self.ids.shape[1]


@dataclass(frozen=True)
class Begun:
    """A question whose prompt was read.

    Attributes:
        documents: what it is about.
        prompt: how it was put.
        evidence: see :class:`Answer`.
        kept: kept positions per page, one row per layer.
        decoding: gives the answer's text.
    """

    documents: tuple[Document, ...]
    prompt: Prompt
    evidence: Tensor | None
    kept: tuple[tuple[int, ...], ...]
    decoding: Decoding

    def answer(self, generation: Generation) -> Answer:
        """The answer with its pages."""
        return Answer(
            text=generation.text,
            reasoning=generation.reasoning,
            citations=cite_pages(generation.text, self.prompt, self.documents, self.evidence),
            metrics=generation.metrics,
            prompt_tokens=len(self.prompt.token_ids),
            finish_reason=generation.finish_reason,
            warnings=self.prompt.warnings,
            prompt=self.prompt,
            evidence=self.evidence,
            page_strip_by_layer=self.kept,
            logprobs=generation.logprobs,
        )


@dataclass(frozen=True)
class Run:
    """How prompts are run.

    Attributes:
        hold: on the weights; the run ends with :class:`ClosedError` once it is let go.
        config: how the cache is built.
        window: most tokens, prompt and answer together.
        notes: what every answer's metrics say besides.
    """

    hold: Hold
    config: PrefillConfig
    window: int
    notes: tuple[str, ...] = ()

    def with_config(self, config: PrefillConfig) -> Run:
        """The same weights with a hold of its own, another config."""
        return replace(self, hold=self.hold.share(), config=config)

    def input(
        self,
        token_ids: Sequence[int] | Tensor,
        request: Request,
        *,
        boundaries: tuple[int, ...] = (),
        reserve: int = 0,
        all_outputs: bool = False,
        prefix: PrefixCache | None = None,
    ) -> RunInput:
        """A checked prompt.

        Raises:
            ConfigError: no ids, or one outside the vocabulary.
            ContextOverflowError: prompt and reserve do not fit the window.
        """
        ids = check_ids(token_ids, self.hold.get().decoder.vocab_size)
        check_window(ids.shape[1], reserve, self.window)
        return RunInput(ids, request, boundaries, reserve, all_outputs, prefix)

    # --- the path ---------------------------------------------------------------------------------------

    def answer(
        self,
        documents: Sequence[Document],
        prompt: Prompt,
        options: Settled,
        request: Request,
        prefix: PrefixCache | None = None,
    ) -> Deltas[Answer]:
        """Yield text deltas of an answer, return the whole with its citations."""
        begun = self.begin(documents, prompt, options, request, prefix)
        generation = yield from begun.decoding.run()
        return begun.answer(generation)

    def begin(
        self,
        documents: Sequence[Document],
        prompt: Prompt,
        options: Settled,
        request: Request,
        prefix: PrefixCache | None = None,
    ) -> Begun:
        """Read a prompt; its answer can be decoded then."""
        given = self.input(
            prompt.token_ids,
            request,
            boundaries=document_ends(prompt),
            reserve=options.max_new_tokens,
            prefix=prefix,
        )
        prefilled = self.prefill(given)
        kept = kept_per_page(prefilled.cache, prompt.spans, self.hold.get().decoder.num_kv_heads)
        decoding = self.decoding(given, prefilled, options.stopping(*prompt.stop))
        return Begun(tuple(documents), prompt, prefilled.evidence, kept, decoding)

    def generate(self, prompt: RunInput, options: Settled) -> Deltas[Generation]:
        """Yield text deltas, return the whole."""
        return (yield from self.decode(prompt, self.prefill(prompt), options))

    def decode(self, prompt: RunInput, prefilled: Prefilled, options: Settled) -> Deltas[Generation]:
        """Yield deltas from a prompt's cache, return the whole."""
        return (yield from self.decoding(prompt, prefilled, options).run())

    def decoding(self, prompt: RunInput, prefilled: Prefilled, options: Settled) -> Decoding:
        """A generation from a prompt's cache."""
        return Decoding(self.hold, prompt.ids, prefilled, self.config.attention, options, prompt.request)

    # --- prefill ----------------------------------------------------------------------------------------

    def prefill(self, prompt: RunInput) -> Prefilled:
        """The compressed cache of a prompt, with what the prefix cache has.

        Looking for a store, reading and filling it are one turn at the model: whoever asks about the same document
        meanwhile finds it finished, and no store is evicted while it is read.
        """
        with self.hold.get().lock.hold(prompt.request.cancel):
            prompt.request.started = time.perf_counter()
            run = self.settled(prompt.length, prompt.reserve)
            obstacle = self.obstacle_to_reuse(prompt.length) if prompt.prefix is not None else ""
            if prompt.prefix is None or obstacle:
                prefilled = run._prefill_once(prompt, ReusePlan(), None)
                prefilled.metrics.notes += [obstacle] if obstacle else []
                return prefilled
            return run._prefill_reusing(prompt, prompt.prefix)

    def settled(self, prompt_length: int, reserve: int = 0) -> Run:
        """This run with an ``"auto"`` chunk size chosen: from the memory that is free now, so once per request.

        ``reserve`` is the room for the answer, which must fit beside it.
        """
        if self.config.chunk_size != AUTO_CHUNK:
            return self
        weights = self.hold.get()
        chosen = choose_chunk_size(weights.shape, prompt_length, self.config, weights.decoder.devices, reserve)
        return replace(self, config=self.config.replace(chunk_size=chosen))

    def obstacle_to_reuse(self, prompt_length: int) -> str:
        """Why a prompt cannot start from stored keys and values; empty if it can."""
        if not make_schedule(self.config.schedule).reuses_prefix:
            return f"schedule {self.config.schedule!r} starts from the first token, so nothing was reused"
        if self.hold.get().decoder.rope_depends_on_length:
            return "this model's keys depend on the length of the whole prompt, so nothing was reused"
        selector = make_selector(self.config)
        if self.config.kept_tokens < prompt_length and selector.needs_all_queries:
            return f"selector {selector.name!r} needs the document's queries too, so nothing was reused"
        return ""

    def identity(self) -> PromptIdentity:
        """What the numbers of a stored prefix depend on here; the chunk size must be settled."""
        weights, config = self.hold.get(), self.config
        numerics = f"chunk_size={config.chunk_size}, attention={config.attention}, schedule={config.schedule}"
        return PromptIdentity(weights.identity, numerics, weights.decoder.num_layers)

    def _prefill_reusing(self, prompt: RunInput, prefix: PrefixCache) -> Prefilled:
        """Prefill from a stored prefix; one that cannot be read is dropped and done without."""
        notes: list[str] = []
        token_ids, identity = tuple(prompt.ids[0].tolist()), self.identity()
        while True:
            plan = prefix.plan(token_ids, prompt.boundaries, self.config.window_size, identity)
            filling = Filling(plan.writer) if plan.writer is not None else None
            try:
                prefilled = self._prefill_once(prompt, plan, filling)
            except CacheError as error:
                if plan.reader is None:
                    raise
                prefix.drop(plan.reader)
                notes = [f"{error}; it was read again"]
            else:
                prefilled.metrics.notes += [*notes, *plan.notes]
                if filling is not None:
                    if filled := filling.finish():
                        prefix.keep(filled)
                    prefilled.metrics.notes += filling.notes
                return prefilled
            finally:
                if filling is not None:
                    filling.abandon()

    def _prefill_once(self, prompt: RunInput, plan: ReusePlan, filling: Filling | None) -> Prefilled:
        weights, config, request = self.hold.get(), self.config, prompt.request
        decoder, chunk_size = weights.decoder, int(config.chunk_size)
        check_exact_length(prompt.length, decoder.max_exact_length())
        with (
            torch.no_grad(),
            memory_errors(f"a prompt of {prompt.length:,} tokens at chunk_size={chunk_size}"),
            MemoryMeter(decoder.device, weights=weights.nbytes) as meter,
        ):
            # Asked under the lock: what an earlier request holds is not free.
            require_memory(weights.shape, prompt.length, config, decoder.devices, prompt.reserve)
            task = PrefillTask(
                config=config,
                request=request,
                meter=meter,
                reserve=prompt.reserve,
                boundaries=prompt.boundaries,
                reader=plan.reader,
                reused=plan.reused,
                writer=filling,
                all_outputs=prompt.all_outputs,
                passages=self._passages(prompt),
            )
            built = make_schedule(config.schedule).build(decoder, prompt.ids, task)
            logits = decoder.logits(built.hidden[:, -1])[0]
            filled = filling.host_bytes if filling is not None else 0
            if decoder.device.type == "cpu":  # elsewhere host memory is no part of the device's peak
                meter.set_component("document_store", filled)
            report = meter.report()
            seconds = time.perf_counter() - request.started
        metrics = self._metrics(report, prompt.length)
        metrics.kept_tokens, metrics.cache_bytes = built.cache.kept_tokens, built.cache.nbytes
        metrics.reused_prefix_tokens = plan.reused
        metrics.components["document_store"] = filled or (plan.reader.host_bytes if plan.reader is not None else 0)
        metrics.prefill_seconds = metrics.ttft_seconds = seconds
        metrics.compress_seconds = request.seconds.get("compress", 0.0)
        return Prefilled(built.cache, logits, prompt.length, metrics, built.evidence, built.hidden[0])

    def _passages(self, prompt: RunInput) -> Passages | None:
        """Lines and sentences of the prompt, if they are asked for and there is a tokenizer to find them with."""
        tokenizer = self.hold.get().tokenizer
        if self.config.pooling != "passage" or tokenizer is None:
            return None
        return Passages.of(tokenizer, prompt.ids[0].tolist())

    def _metrics(self, report: MemoryReport, prompt_tokens: int) -> Metrics:
        notes = list(self.notes)
        if report.process_method == "sampled":
            notes.append("the process peak was sampled every few milliseconds, so short peaks can be missed")
        if report.shared:
            notes.append("another request ran at the same time; the peaks hold its memory too")
        selector = self.config.selector
        return Metrics(
            prompt_tokens=prompt_tokens,
            chunk_size=int(self.config.chunk_size),
            construction_peak_bytes=report.construction_peak_bytes,
            transient_bytes=report.transient_bytes,
            peaks=dict(report.peaks),
            components=dict(report.components),
            selector=selector if isinstance(selector, str) else selector.name,
            schedule=self.config.schedule,
            attention=self.config.attention,
            notes=notes,
        )
