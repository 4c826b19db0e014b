"""TideKV: the whole path on one page.

documents -> prompt -> layer-major prefill -> compressed cache -> decode -> answer with page citations
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.cache.cache_file import CacheOwner
from tidekv_llm.compress.selectors import make_selector
from tidekv_llm.config import PrefillConfig, whole_number
from tidekv_llm.decode.loop import DecodeAdapter, decode_tokens
from tidekv_llm.decode.sampling import Sampler, Sampling
from tidekv_llm.decode.text import TextStream
from tidekv_llm.documents import (
    DEFAULT_INSTRUCTIONS,
    Citation,
    Document,
    Prompt,
    build_prompt,
    chat_prompt,
    cite_pages,
    document_ends,
)
from tidekv_llm.errors import CacheError, ClosedError, ConfigError, ContextOverflowError, MemoryLimitError
from tidekv_llm.evidence import kept_per_page
from tidekv_llm.hf import Decoder
from tidekv_llm.lock import FairLock
from tidekv_llm.memory import MemoryMeter, MemoryReport, weight_bytes
from tidekv_llm.metrics import Metrics
from tidekv_llm.models import LoadedModel, load
from tidekv_llm.models.shapes import shape_of
from tidekv_llm.planner import choose_chunk_size, require_memory
from tidekv_llm.prefill.result import Prefilled
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.prefixes.identity import model_identity
from tidekv_llm.prefixes.pool import PrefixPool
from tidekv_llm.prefixes.reuse import PrefixCache, PromptIdentity, Reuse, SharedPrefix
from tidekv_llm.request import ProgressCallback, Request
from tidekv_llm.schedules import make_schedule
from tidekv_llm.selfcheck import check_decoder
from tidekv_llm.shapes import ModelShape

if TYPE_CHECKING:
    from tidekv_llm.documents.prompt import HistoryTurn
    from tidekv_llm.session import Session

Messages = Sequence[Mapping[str, Any]]
PromptInput = str | Messages | Sequence[int] | Tensor


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation.

    Attributes:
        text: the answer, without special tokens, cut before a stop string.
        token_ids: what was sampled, the end-of-sequence token not included.
        finish_reason: ``"stop"`` (end of sequence or a stop string) or ``"length"``.
        metrics: times and bytes.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer about documents.

    Attributes:
        text: the answer.
        citations: pages it rests on, each saying how that was found.
        metrics: times and bytes.
        prompt_tokens: tokens of the whole prompt; nothing was cut.
        finish_reason: ``"stop"`` or ``"length"``.
        warnings: pages that could not be read, and the like.
        prompt: the prompt, with each page's token range.
        evidence: float32 [S], the scores each prompt position was kept for; None for query-agnostic selectors.
        page_strip_by_layer: kept positions per page (``prompt.spans``), one row per layer, summed over KV heads.
    """

    text: str
    citations: tuple[Citation, ...]
    metrics: Metrics
    prompt_tokens: int
    finish_reason: str
    warnings: tuple[str, ...]
    prompt: Prompt
    evidence: Tensor | None
    page_strip_by_layer: tuple[tuple[int, ...], ...]

    @property
    def page_strip(self) -> tuple[int, ...]:
        """Kept positions per page, summed over layers and KV heads."""
        return tuple(sum(column) for column in zip(*self.page_strip_by_layer, strict=True))


Result = TypeVar("Result", Generation, Answer)


class _Deltas(Generic[Result]):
    """Text deltas that end with a result."""

    def __init__(self, deltas: Generator[str, None, Result]) -> None:
        self._deltas: Generator[str, None, Result] = deltas
        self._result: Result | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            return next(self._deltas)
        except StopIteration as end:
            if end.value is not None:
                self._result = end.value
            raise

    def close(self) -> None:
        """Stop generating and release the cache."""
        self._deltas.close()

    def drain(self, on_text: Callable[[str], None] | None = None) -> Result:
        """Run to the end, telling ``on_text`` each delta, and return the result."""
        for delta in self:
            if on_text is not None:
                on_text(delta)
        assert self._result is not None
        return self._result

    @property
    def metrics(self) -> Metrics | None:
        """Figures of the finished generation, None before."""
        return self._result.metrics if self._result else None


class Stream(_Deltas[Generation]):
    """Text deltas of a generation; :attr:`generation` holds the whole once they are through."""

    @property
    def generation(self) -> Generation | None:
        """The finished generation, None before."""
        return self._result


class AnswerStream(_Deltas[Answer]):
    """Text deltas of an answer; :attr:`answer` holds the whole once they are through."""

    @property
    def answer(self) -> Answer | None:
        """The finished answer, None before."""
        return self._result


class _Weights:
    """A model in memory, shared by engines with different options; freed when the last one is closed."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.decoder = Decoder(model)
        self.nbytes = weight_bytes(model)
        self.lock = FairLock()
        self.users = 0
        self.check_error = check_decoder(self.decoder)
        self.pool = PrefixPool()

    @cached_property
    def identity(self) -> str:
        """What tells these weights from others in a store's key."""
        return model_identity(self.model)


class TideKV:
    """A language model that reads whole documents with layer-major prefill and delayed eviction.

    Args:
        model: a transformers causal language model that is already loaded; its settings are left as they are.
        tokenizer: its tokenizer; without one, prompts are token ids and no text comes back.
        prefill: how the cache is built.
        context_window: most tokens, prompt and answer together; default: the model's own limit.
        name: what to call the model in messages.

    Raises:
        UnsupportedModelError: the self-check failed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        prefill: PrefillConfig | None = None,
        context_window: int | None = None,
        name: str | None = None,
    ) -> None:
        if context_window is not None:
            whole_number("context_window", context_window, least=1)
        weights = _Weights(model, tokenizer, name or type(model).__name__)
        self._attach(weights, prefill or PrefillConfig(), context_window or _trained_window(weights.decoder), ())

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        prefill: PrefillConfig | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        context_window: int | None = None,
        load_progress: Any = None,
        **transformers_options: Any,
    ) -> TideKV:
        """Load a model by alias, hub id, folder or GGUF file (see :func:`tidekv_llm.models.load`).

        Raises:
            ModelError: it cannot be had, is unsafe or unsupported.
            ConfigError: dtype, device or context window are impossible.
        """
        config = prefill or PrefillConfig()
        loaded: LoadedModel = load(
            name_or_path,
            device=device,
            dtype=dtype,
            context_window=context_window,
            progress=load_progress,
            **transformers_options,
        )
        engine = cls(
            loaded.model,
            loaded.tokenizer,
            prefill=config,
            context_window=loaded.context_window,
            name=loaded.name,
        )
        if loaded.rope_note:
            engine._notes = (loaded.rope_note,)
        return engine

    def _attach(self, weights: _Weights, config: PrefillConfig, context_window: int, notes: tuple[str, ...]) -> None:
        weights.users += 1
        self._weights: _Weights | None = weights
        self.config = config
        self.context_window = context_window
        self._notes = notes
        self._prefix: PrefixCache | None = None

    def with_prefill(self, **changes: Any) -> TideKV:
        """An engine on the same weights with some prefill options changed.

        Raises:
            ConfigError: an option is unknown or impossible.
        """
        config = self.config.replace(**changes)
        other = TideKV.__new__(type(self))
        other._attach(self._open(), config, self.context_window, self._notes)
        other._prefix = self._prefix
        return other

    def with_schedule(self, schedule: str) -> TideKV:
        """An engine on the same weights that builds the cache in another order."""
        return self.with_prefill(schedule=schedule)

    def with_prefix_cache(self, limit_bytes: int) -> TideKV:
        """An engine on the same weights that reuses what consecutive prompts share.

        Args:
            limit_bytes: most host memory for stored prefixes (see :attr:`Metrics.reused_prefix_tokens`).
        """
        whole_number("limit_bytes", limit_bytes, least=1)
        other = self.with_prefill()
        other._prefix = SharedPrefix(limit_bytes)
        return other

    # --- life cycle -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the model; its memory is freed when the last engine that shares it is closed."""
        if self._weights is not None:
            self._weights.users -= 1
            self._weights = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> _Weights:
        if self._weights is None:
            raise ClosedError("this engine was closed; make a new one")
        return self._weights

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self._open().model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer."""
        return self._open().tokenizer

    @property
    def device(self) -> torch.device:
        """Where prompts go in."""
        return self._open().decoder.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that holds a part of the model."""
        return self._open().decoder.devices

    @property
    def name(self) -> str:
        """What the model is called."""
        return self._open().name

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions, as the planner uses them."""
        return shape_of(self._open().decoder, self._open().nbytes)

    @property
    def decoder(self) -> Decoder:
        """The model taken apart into layers, for tools that run them."""
        return self._open().decoder

    @property
    def cache_owner(self) -> CacheOwner:
        """What a saved cache must have been saved for (``cache.save(path, llm.cache_owner)``)."""
        weights = self._open()
        digest = hashlib.sha256(weights.identity.encode()).hexdigest()[:16]
        return CacheOwner.of(weights.decoder, f"{weights.name}@{digest}")

    # --- the path ---------------------------------------------------------------------------------------

    def ask(
        self,
        documents: Document | Sequence[Document],
        question: str,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        history: Sequence[HistoryTurn] = (),
        instructions: str | None = None,
        on_text: Callable[[str], None] | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Answer:
        """Answer a question from whole documents, with the pages it rests on.

        Args:
            documents: one or several; their whole text goes into the prompt, before the question.
            question: what the user wants to know.
            max_new_tokens: longest answer; counted against the context window.
            temperature: 0 takes the most likely token; see :class:`Sampling` for the next two and ``seed``.
            top_p: see :class:`Sampling`.
            top_k: see :class:`Sampling`.
            stop: strings at whose first occurrence the answer is cut.
            seed: makes sampling repeatable.
            history: earlier (question, answer) pairs of the conversation.
            instructions: what the model is told to do with the documents, instead of the default.
            on_text: called with each piece of the answer as it comes.
            progress: called after every chunk step of the prefill.
            cancel: set it to stop within one chunk step or token.

        Raises:
            ContextOverflowError: the documents do not fit; the message names both sizes, and nothing was run.
            DocumentError: no page can be read.
            Cancelled: ``cancel`` was set.
        """
        pages = (documents,) if isinstance(documents, Document) else tuple(documents)
        options = _options(max_new_tokens, temperature, top_p, top_k, stop, seed)
        prompt = build_prompt(
            pages,
            question,
            self._need_tokenizer(),
            history=history,
            limit=self.context_window,
            answer_reserve=options.max_new_tokens,
            instructions=DEFAULT_INSTRUCTIONS if instructions is None else instructions,
        )
        deltas = self._answer(pages, prompt, options, Request(progress, cancel))
        return AnswerStream(deltas).drain(on_text)

    def generate(
        self,
        prompt: PromptInput,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: a raw string, a list of messages (sent through the chat template), or token ids.
            max_new_tokens: most tokens to generate.
            temperature: 0 takes the most likely token.
            top_p: see :class:`Sampling`.
            top_k: see :class:`Sampling`.
            stop: strings at whose first occurrence the text is cut.
            seed: makes sampling repeatable.
            ignore_eos: go on past the end of sequence, to exactly ``max_new_tokens`` (for measuring).
            progress: called after every chunk step of the prefill.
            cancel: set it to stop within one chunk step or token.

        Raises:
            ContextOverflowError: prompt and answer do not fit the context window.
            ConfigError: an option is out of range, or the prompt is empty.
            Cancelled: ``cancel`` was set.
        """
        options = _options(max_new_tokens, temperature, top_p, top_k, stop, seed, ignore_eos)
        token_ids = self.encode(prompt)
        return Stream(self._generate(token_ids, options, Request(progress, cancel))).drain()

    def stream(
        self,
        prompt: PromptInput,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Stream:
        """Like :meth:`generate`, as text deltas; bad arguments raise here, not at the first delta."""
        options = _options(max_new_tokens, temperature, top_p, top_k, stop, seed)
        token_ids = self.encode(prompt)
        self._check_ids(token_ids)
        self._check_length(len(token_ids), options.max_new_tokens)
        return Stream(self._generate(token_ids, options, Request(progress, cancel)))

    def prefill(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        document_end: int = 0,
        reserve: int = 0,
        all_outputs: bool = False,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Prefilled:
        """Build the compressed cache of a prompt.

        Args:
            token_ids: the prompt, S ids.
            document_end: a position where a chunk must end (the end of the document part), 0 for none.
            reserve: room for this many decoded tokens.
            all_outputs: compute the last layer's hidden states of all positions (to measure fidelity).
            progress: called after every chunk step.
            cancel: set it to stop within one chunk step.

        Raises:
            ContextOverflowError: the prompt does not fit.
            ConfigError: it is empty or has ids outside the vocabulary.
            Cancelled: ``cancel`` was set.
        """
        ids = self._check_ids(token_ids)
        whole_number("reserve", reserve, least=0)
        self._check_length(ids.shape[1], reserve)
        if not 0 <= document_end <= ids.shape[1]:
            raise ConfigError(f"document_end={document_end} must lie within the prompt of {ids.shape[1]} tokens")
        request = Request(progress, cancel)
        return self._prefill(ids, request, boundaries=(document_end,), reserve=reserve, all_outputs=all_outputs)

    def encode(self, prompt: PromptInput) -> list[int]:
        """Token ids of a prompt: a raw string, messages through the chat template (one BOS), or ids as they are."""
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError("the prompt is empty; write at least one character")
            encoded = self._need_tokenizer()(prompt).input_ids
            return [int(token) for token in encoded]
        if isinstance(prompt, Tensor):
            return [int(token) for token in _one_prompt(prompt)]
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return chat_prompt(items, self._need_tokenizer())  # type: ignore[arg-type]
        if items and all(isinstance(item, int) for item in items):
            return [item for item in items if isinstance(item, int)]
        raise ConfigError("a prompt is a string, a non-empty list of messages, or a non-empty list of token ids")

    def open(
        self,
        documents: Document | Sequence[Document],
        *,
        store: str = "memory",
        name: str | None = None,
        instructions: str | None = None,
        int8: bool = False,
        limit_bytes: int | None = None,
    ) -> Session:
        """Open documents for several questions: their keys and values are computed once.

        The first question reads the documents (or :meth:`Session.ingest` does); each later one costs its own tokens,
        and its answer is what a fresh prefill of the same prompt gives.

        Args:
            documents: one or several.
            store: ``"memory"`` (host memory) or ``"disk"`` (private files that outlive the process).
            name: of a session on disk; the same name and documents find the same store again.
            instructions: what the model is told to do with the documents, instead of the default.
            int8: store 8-bit integers: half the bytes, answers no longer exact; memory only.
            limit_bytes: most host memory for the stores of all sessions on these weights (``"disk"``: most bytes of
                all sessions' files); the least recently used document goes first and is read again when it is asked
                about.

        Raises:
            ConfigError: an option is unknown, or the documents do not fit the context window.
        """
        from tidekv_llm.session import Session

        pages = (documents,) if isinstance(documents, Document) else tuple(documents)
        if limit_bytes is not None:
            whole_number("limit_bytes", limit_bytes, least=1)
            if store == "memory":
                self._open().pool.limit_bytes = limit_bytes
        return Session(
            self,
            pages,
            store=store,
            name=name,
            instructions=instructions,
            int8=int8,
            limit_bytes=limit_bytes,
        )

    # --- inside -----------------------------------------------------------------------------------------

    def _answer(
        self,
        pages: Sequence[Document],
        prompt: Prompt,
        options: _Options,
        request: Request,
        prefix: PrefixCache | None = None,
    ) -> Generator[str, None, Answer]:
        """Yield text deltas of an answer, return the whole with its citations."""
        evidence: Tensor | None = None
        strip: tuple[tuple[int, ...], ...] = ()

        def look(prefilled: Prefilled) -> None:
            nonlocal evidence, strip
            evidence = prefilled.evidence
            strip = kept_per_page(prefilled.cache, prompt.spans, self.decoder.num_kv_heads)

        ends = document_ends(prompt)
        generation = yield from self._generate(
            prompt.token_ids, options, request, ends, prefix=prefix, on_prefilled=look
        )
        return Answer(
            text=generation.text,
            citations=cite_pages(generation.text, prompt, pages, evidence),
            metrics=generation.metrics,
            prompt_tokens=len(prompt.token_ids),
            finish_reason=generation.finish_reason,
            warnings=prompt.warnings,
            prompt=prompt,
            evidence=evidence,
            page_strip_by_layer=strip,
        )

    def _generate(
        self,
        token_ids: Sequence[int],
        options: _Options,
        request: Request,
        boundaries: Sequence[int] = (),
        *,
        prefix: PrefixCache | None = None,
        on_prefilled: Callable[[Prefilled], None] | None = None,
    ) -> Generator[str, None, Generation]:
        """Yield text deltas, return the whole. No lock and no grad mode is held across a yield."""
        self._check_length(len(token_ids), options.max_new_tokens)
        weights = self._open()
        ids = self._check_ids(token_ids)
        prefilled = self._prefill(
            ids, request, boundaries=boundaries, reserve=options.max_new_tokens, prefix=prefix or self._prefix
        )
        if on_prefilled is not None:
            on_prefilled(prefilled)
        metrics = prefilled.metrics
        adapter = DecodeAdapter(weights.decoder, prefilled.cache, AttentionDispatch(self.config.attention))
        text = TextStream(weights.tokenizer, options.stop) if weights.tokenizer is not None else None
        stop_ids = frozenset[int]() if options.ignore_eos else self._stop_ids()
        new_ids: list[int] = []
        finish_reason, first_at, away = "length", 0.0, 0.0
        for token in decode_tokens(
            lambda ids: self._step(adapter, ids, request),
            prefilled.logits,
            Sampler(options.sampling),
            max_new_tokens=options.max_new_tokens,
        ):
            if not first_at:
                first_at = time.perf_counter()
                metrics.ttft_seconds = first_at - request.started
            if token in stop_ids:
                finish_reason = "stop"
                break
            new_ids.append(token)
            if text is not None:
                if delta := text.push(token):
                    handed_out = time.perf_counter()
                    yield delta
                    away += time.perf_counter() - handed_out  # the reader's time is not decoding
                if text.stopped:
                    finish_reason = "stop"
                    break
        elapsed = time.perf_counter() - first_at - away
        metrics.new_tokens = len(new_ids)
        if len(new_ids) > 1 and elapsed > 0:
            metrics.decode_tokens_per_second = (len(new_ids) - 1) / elapsed
        if text is not None and (delta := text.finish()):
            yield delta
        return Generation(text.text if text is not None else "", new_ids, finish_reason, metrics)

    def _step(self, adapter: DecodeAdapter, token_ids: Tensor, request: Request) -> Tensor:
        request.check_cancelled()
        weights = self._open()
        with weights.lock.hold(request.cancel), _memory_errors("decoding"):
            return adapter.step(token_ids)

    def _prefill(
        self,
        ids: Tensor,
        request: Request,
        *,
        boundaries: Sequence[int],
        reserve: int,
        all_outputs: bool = False,
        prefix: PrefixCache | None = None,
    ) -> Prefilled:
        """Prefill with what the prefix cache has; a store that cannot be read is dropped and done without.

        Looking for a store, reading and filling it are one turn at the model: whoever asks about the same document
        meanwhile finds it finished, and no store is evicted while it is read.
        """
        with self._open().lock.hold(request.cancel):
            request.started = time.perf_counter()
            obstacle = self._obstacle_to_reuse(ids.shape[1])
            if prefix is None or obstacle:
                prefilled = self._prefill_once(ids, request, Reuse(), boundaries, reserve, all_outputs)
                prefilled.metrics.notes += [obstacle] if prefix is not None and obstacle else []
                return prefilled
            return self._prefill_reusing(prefix, ids, request, boundaries, reserve, all_outputs)

    def _prefill_reusing(
        self,
        prefix: PrefixCache,
        ids: Tensor,
        request: Request,
        boundaries: Sequence[int],
        reserve: int,
        all_outputs: bool,
    ) -> Prefilled:
        notes: list[str] = []
        token_ids, identity = tuple(ids[0].tolist()), self._identity(self._chunk_size(ids.shape[1]))
        while True:
            reuse = prefix.plan(token_ids, boundaries, self.config.window_size, identity)
            reuse.notes[:0] = notes
            try:
                prefilled = self._prefill_once(ids, request, reuse, boundaries, reserve, all_outputs)
            except CacheError as error:
                if reuse.reader is None:
                    raise
                prefix.drop(reuse.reader)
                notes = [f"{error}; it was read again"]
            else:
                reuse.finish()
                prefilled.metrics.notes += reuse.notes
                return prefilled
            finally:
                reuse.abandon()

    def _obstacle_to_reuse(self, prompt_length: int) -> str:
        """Why this engine cannot start from stored keys and values; empty if it can."""
        if not make_schedule(self.config.schedule).reuses_prefix:
            return f"schedule {self.config.schedule!r} starts from the first token, so nothing was reused"
        if self._open().decoder.rope_depends_on_length:
            return "this model's keys depend on the length of the whole prompt, so nothing was reused"
        selector = make_selector(self.config)
        if self.config.kept_tokens < prompt_length and selector.needs_all_queries:
            return f"selector {selector.name!r} needs the document's queries too, so nothing was reused"
        return ""

    def _chunk_size(self, prompt_length: int) -> int:
        chunk_size = self.config.chunk_size
        if chunk_size == "auto":
            return choose_chunk_size(self.shape, prompt_length, self.config, self._open().decoder.devices)
        return int(chunk_size)

    def _identity(self, chunk_size: int) -> PromptIdentity:
        weights = self._open()
        numerics = f"chunk_size={chunk_size}, attention={self.config.attention}, schedule={self.config.schedule}"
        return PromptIdentity(weights.identity, numerics, weights.decoder.num_layers)

    def _prefill_once(
        self,
        ids: Tensor,
        request: Request,
        reuse: Reuse,
        boundaries: Sequence[int],
        reserve: int,
        all_outputs: bool,
    ) -> Prefilled:
        weights = self._open()
        decoder, length = weights.decoder, ids.shape[1]
        exact = decoder.max_exact_length()
        if exact is not None and length > exact:
            raise ContextOverflowError(
                f"{length:,} prompt tokens exceed the {exact:,} of this family's chunked attention; shorten the prompt",
                prompt_tokens=length,
                limit=exact,
            )
        chunk_size = self._chunk_size(length)
        config = self.config.replace(chunk_size=chunk_size)
        with (
            torch.no_grad(),
            _memory_errors(f"a prompt of {length:,} tokens at chunk_size={chunk_size}"),
            MemoryMeter(decoder.device, weights=weights.nbytes) as meter,
        ):
            # Asked under the lock: what an earlier request holds is not free.
            require_memory(self.shape, length, config, decoder.devices, reserve)
            task = PrefillTask(
                config=config,
                request=request,
                meter=meter,
                reserve=reserve,
                boundaries=tuple(boundaries),
                reader=reuse.reader,
                reused=reuse.reused,
                writer=reuse if reuse.writer is not None else None,
                all_outputs=all_outputs,
            )
            built = make_schedule(config.schedule).build(decoder, ids, task)
            logits = decoder.logits(built.hidden[:, -1])[0]
            if decoder.device.type == "cpu":  # elsewhere host memory is no part of the device's peak
                meter.set_component("document_store", reuse.filled_bytes)
            report = meter.report()
            seconds = time.perf_counter() - request.started
        metrics = self._metrics(report, built.cache.kept_tokens, built.cache.nbytes, length, chunk_size)
        metrics.reused_prefix_tokens = reuse.reused
        metrics.components["document_store"] = reuse.host_bytes
        metrics.prefill_seconds = metrics.ttft_seconds = seconds
        metrics.compress_seconds = request.seconds.get("compress", 0.0)
        return Prefilled(built.cache, logits, length, metrics, built.evidence, built.hidden[0])

    def _metrics(
        self, report: MemoryReport, kept_tokens: int, cache_bytes: int, prompt_tokens: int, chunk_size: int
    ) -> Metrics:
        notes = list(self._notes)
        if report.process_method == "sampled":
            notes.append("the process peak was sampled every few milliseconds, so short peaks can be missed")
        if report.shared:
            notes.append("another request ran at the same time; the peaks hold its memory too")
        selector = self.config.selector
        return Metrics(
            prompt_tokens=prompt_tokens,
            chunk_size=chunk_size,
            kept_tokens=kept_tokens,
            cache_bytes=cache_bytes,
            construction_peak_bytes=report.construction_peak_bytes,
            transient_bytes=report.transient_bytes,
            peaks=dict(report.peaks),
            components=dict(report.components),
            selector=selector if isinstance(selector, str) else selector.name,
            schedule=self.config.schedule,
            attention=self.config.attention,
            notes=notes,
        )

    def _check_ids(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        ids = _one_prompt(token_ids)[None]
        if ids.shape[1] == 0:
            raise ConfigError("the prompt has no tokens; give at least one")
        vocabulary = self._open().decoder.vocab_size
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise ConfigError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary:,}")
        return ids

    def _check_length(self, prompt_tokens: int, reserve: int) -> None:
        needed = prompt_tokens + reserve
        if needed > self.context_window:
            raise ContextOverflowError(
                f"{prompt_tokens:,} prompt tokens + {reserve:,} for the answer exceed the context window of "
                f"{self.context_window:,}; shorten the prompt, lower max_new_tokens or raise context_window",
                prompt_tokens=needed,
                limit=self.context_window,
            )

    def _need_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = self._open().tokenizer
        if tokenizer is None:
            raise ConfigError("this engine has no tokenizer; pass one to TideKV(...), or token ids as the prompt")
        return tokenizer

    def _stop_ids(self) -> frozenset[int]:
        """Every end-of-sequence id that the model or its tokenizer names."""
        weights = self._open()
        found = getattr(weights.model.generation_config, "eos_token_id", None)
        ids = set(found) if isinstance(found, (list, tuple)) else {found}
        ids.add(getattr(weights.tokenizer, "eos_token_id", None))
        return frozenset(token for token in ids if token is not None)


@dataclass(frozen=True, slots=True)
class _Options:
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool


def _options(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop: Sequence[str],
    seed: int | None,
    ignore_eos: bool = False,
) -> _Options:
    whole_number("max_new_tokens", max_new_tokens, least=1)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(not text for text in stops):
        raise ConfigError("a stop string is empty; leave it out")
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    return _Options(max_new_tokens, sampling, stops, ignore_eos)


def _one_prompt(token_ids: Sequence[int] | Tensor) -> Tensor:
    """Ids [S] from ids [S] or [1, S]; a batch would otherwise be read as one long prompt."""
    ids = torch.as_tensor(token_ids)
    if ids.dim() != 1 and (ids.dim() != 2 or ids.shape[0] != 1):
        raise ConfigError(f"token ids must be one prompt [S] or [1, S], not of shape {tuple(ids.shape)}")
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ConfigError(f"token ids must be whole numbers, not {ids.dtype}")
    return ids.flatten().long()


def _trained_window(decoder: Decoder) -> int:
    return int(getattr(decoder.config, "max_position_embeddings", 0) or 2**31 - 1)


@contextmanager
def _memory_errors(what: str) -> Iterator[None]:
    """Turn an allocator's refusal into our error; the tensors of the request are gone by then."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryLimitError(f"out of memory in {what}; lower chunk_size or kept_tokens") from error
    except RuntimeError as error:
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise MemoryLimitError(f"out of memory in {what}; lower chunk_size or kept_tokens") from error
        raise
