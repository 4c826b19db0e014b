"""TideKV: the whole path behind one object.

documents -> prompt -> layer-major prefill -> compressed cache -> decode -> answer with page citations
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from tidekv_llm.config import PrefillConfig, whole_number
from tidekv_llm.documents import DEFAULT_INSTRUCTIONS, Document, build_prompt, chat_prompt
from tidekv_llm.documents.template import TemplateKwargs
from tidekv_llm.documents.tokens import check_characters
from tidekv_llm.engine.answers import Answer, AnswerStream, Generation, OnText, Stream
from tidekv_llm.engine.limits import one_prompt
from tidekv_llm.engine.run import Run
from tidekv_llm.engine.session import TOGETHER, Session
from tidekv_llm.engine.together import OnAnswer, Outcome
from tidekv_llm.engine.weights import Hold, Weights, WeightsUser
from tidekv_llm.errors import ConfigError
from tidekv_llm.models import Progress, load
from tidekv_llm.options import GenerationOptions, Settled, settle
from tidekv_llm.prefixes.shared import SharedPrefix
from tidekv_llm.request import ProgressCallback, Request
from tidekv_llm.weights.dtypes import floating_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tidekv_llm.documents.prompt import HistoryTurn
    from tidekv_llm.prefill.result import Prefilled

Messages = Sequence[Mapping[str, Any]]
PromptInput = str | Messages | Sequence[int] | Tensor


class TideKV(WeightsUser):
    """A language model that reads whole documents with layer-major prefill and delayed eviction.

    Args:
        model: a transformers causal language model that is already loaded; its settings are left as they are.
        tokenizer: its tokenizer; without one, prompts are token ids and no text comes back.
        prefill: how the cache is built.
        context_window: most tokens, prompt and answer together; default: the model's own limit.
        compute_dtype: what the layers compute in, one made ready at a time; default: what is fastest here.
        name: what to call the model in messages.

    Raises:
        UnsupportedModelError: the self-check failed.
        ConfigError: the compute dtype is unknown, or the weights are packed and compute as they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        prefill: PrefillConfig | None = None,
        context_window: int | None = None,
        compute_dtype: str | torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        if context_window is not None:
            whole_number("context_window", context_window, least=1)
        computing = None if compute_dtype is None else floating_dtype("compute_dtype", compute_dtype)
        weights = Weights(model, tokenizer, name or type(model).__name__, computing)
        self._attach(Hold(weights), prefill or PrefillConfig(), context_window or weights.trained_window, ())

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        prefill: PrefillConfig | None = None,
        load_progress: Progress | None = None,
        **options: Any,
    ) -> TideKV:
        """Load a model by alias, hub id, folder or GGUF file.

        Args:
            name_or_path: which.
            prefill: how the cache is built.
            load_progress: called with a message and the fraction done.
            **options: ``device``, ``dtype``, ``compute_dtype``, ``context_window`` and those of
                ``transformers.from_pretrained``, as :func:`tidekv_llm.models.load` takes them.

        Raises:
            ModelError: it cannot be had, is unsafe or unsupported.
            ConfigError: an option is impossible.
        """
        loaded = load(name_or_path, progress=load_progress, **options)
        engine = cls(
            *(loaded.model, loaded.tokenizer),
            prefill=prefill,
            context_window=loaded.context_window,
            compute_dtype=loaded.compute_dtype,
            name=loaded.name,
        )
        engine._notes = tuple(note for note in (loaded.rope_note, loaded.weights_note) if note)
        return engine

    def _attach(self, hold: Hold, config: PrefillConfig, context_window: int, notes: tuple[str, ...]) -> None:
        self._hold = hold
        self.config = config
        self.context_window = context_window
        self._notes = notes
        self._prefix: SharedPrefix | None = None

    def with_prefill(self, config: PrefillConfig | None = None, /, **changes: Any) -> TideKV:
        """An engine on the same weights with other prefill options.

        Args:
            config: all of them; the engine's own without one.
            **changes: fields of :class:`PrefillConfig` to change in it.

        Raises:
            ConfigError: an option is unknown or impossible.
        """
        config = (config or self.config).replace(**changes)
        other = TideKV.__new__(type(self))
        other._attach(self._hold.share(), config, self.context_window, self._notes)
        other._prefix = self._prefix
        return other

    def with_prefix_cache(self, limit_bytes: int) -> TideKV:
        """An engine on the same weights that reuses what consecutive prompts share.

        Args:
            limit_bytes: most host memory for stored prefixes (see :attr:`Metrics.reused_prefix_tokens`).
        """
        whole_number("limit_bytes", limit_bytes, least=1)
        other = self.with_prefill()
        other._prefix = SharedPrefix(limit_bytes)
        return other

    def _run(self) -> Run:
        return Run(self._hold, self.config, self.context_window, self._notes)

    # --- the path ---------------------------------------------------------------------------------------

    def ask(
        self,
        documents: Document | Sequence[Document],
        question: str,
        *,
        history: Sequence[HistoryTurn] = (),
        instructions: str | None = None,
        chat_template_kwargs: TemplateKwargs | None = None,
        on_text: OnText | None = None,
        on_reasoning: OnText | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Answer:
        """Answer a question from whole documents, with the pages it rests on.

        Args:
            documents: one or several; their whole text goes into the prompt, before the question.
            question: what the user wants to know.
            history: earlier (question, answer) pairs of the conversation.
            instructions: what the model is told to do with the documents, instead of the default.
            chat_template_kwargs: values for the chat template's own names, ``{"enable_thinking": True}`` say.
            on_text: called with each piece of the answer as it comes.
            on_reasoning: called with each piece of the reasoning, for models that mark it.
            progress: called after every chunk step of the prefill.
            cancel: set it to stop within one chunk step or token.
            **options: length, sampling and stops; see :class:`GenerationOptions`.

        Raises:
            ContextOverflowError: the documents do not fit; the message names both sizes, and nothing was run.
            DocumentError: no page can be read.
            ConfigError: an option is unknown or impossible.
            Cancelled: ``cancel`` was set.
        """
        documents, settled = _as_tuple(documents), settle(options)
        prompt = build_prompt(
            documents,
            question,
            self._open().need_tokenizer(),
            history=history,
            limit=self.context_window,
            answer_reserve=settled.max_new_tokens,
            instructions=DEFAULT_INSTRUCTIONS if instructions is None else instructions,
            chat_template_kwargs=chat_template_kwargs,
        )
        deltas = self._run().answer(documents, prompt, settled, Request(progress, cancel), self._prefix)
        return AnswerStream(deltas).drain(on_text, on_reasoning)

    def ask_many(
        self,
        documents: Document | Sequence[Document],
        questions: Sequence[str],
        *,
        together: int = TOGETHER,
        instructions: str | None = None,
        chat_template_kwargs: TemplateKwargs | None = None,
        on_answer: OnAnswer | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | Sequence[threading.Event | None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Outcome]:
        """Answer several questions from the same documents, which are read once; see :meth:`Session.ask_many`."""
        asked = {"together": together, "on_answer": on_answer, "progress": progress, "cancel": cancel}
        with self.open(documents, instructions=instructions, chat_template_kwargs=chat_template_kwargs) as session:
            return session.ask_many(questions, **asked, **options)  # type: ignore[arg-type]

    def generate(
        self,
        prompt: PromptInput,
        *,
        ignore_eos: bool = False,
        chat_template_kwargs: TemplateKwargs | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: a raw string, a list of messages (sent through the chat template), or token ids.
            ignore_eos: go on past the end of sequence, to exactly ``max_new_tokens`` (for measuring).
            chat_template_kwargs: values for the chat template's own names, ``{"enable_thinking": True}`` say.
            progress: called after every chunk step of the prefill.
            cancel: set it to stop within one chunk step or token.
            **options: length, sampling and stops; see :class:`GenerationOptions`.

        Raises:
            ContextOverflowError: prompt and answer do not fit the context window.
            ConfigError: an option is unknown or impossible, or the prompt is empty.
            Cancelled: ``cancel`` was set.
        """
        settled = settle(options, ignore_eos=ignore_eos)
        return self._stream(prompt, settled, chat_template_kwargs, Request(progress, cancel)).drain()

    def stream(
        self,
        prompt: PromptInput,
        *,
        chat_template_kwargs: TemplateKwargs | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Like :meth:`generate`, as text deltas; bad arguments raise here, not at the first delta."""
        return self._stream(prompt, settle(options), chat_template_kwargs, Request(progress, cancel))

    def _stream(
        self, prompt: PromptInput, options: Settled, chat_template_kwargs: TemplateKwargs | None, request: Request
    ) -> Stream:
        run, ids = self._run(), self.encode(prompt, chat_template_kwargs)
        options = options.stopping(self._open().turn_end.text) if _is_chat(prompt) else options
        given = run.input(ids, request, reserve=options.max_new_tokens, prefix=self._prefix)
        return Stream(run.generate(given, options))

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
        whole_number("reserve", reserve, least=0)
        run, request = self._run(), Request(progress, cancel)
        given = run.input(token_ids, request, boundaries=(document_end,), reserve=reserve, all_outputs=all_outputs)
        if not 0 <= document_end <= given.length:
            raise ConfigError(f"document_end={document_end} must lie within the prompt of {given.length} tokens")
        return run.prefill(given)

    def encode(self, prompt: PromptInput, chat_template_kwargs: TemplateKwargs | None = None) -> list[int]:
        """Token ids of a prompt: a raw string, messages through the chat template (one BOS), or ids as they are.

        Raises:
            ConfigError: it is empty or none of the three, or the template does not take the messages.
        """
        return _token_ids(prompt, self._open(), chat_template_kwargs)

    def open(
        self,
        documents: Document | Sequence[Document],
        *,
        store: str = "memory",
        name: str | None = None,
        instructions: str | None = None,
        int8: bool = False,
        limit_bytes: int | None = None,
        chat_template_kwargs: TemplateKwargs | None = None,
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
            chat_template_kwargs: values for the chat template's own names, ``{"enable_thinking": True}`` say.

        Raises:
            ConfigError: an option is unknown, or the documents do not fit the context window.
        """
        return Session(
            self._run(),
            _as_tuple(documents),
            store=store,
            name=name,
            instructions=instructions,
            int8=int8,
            limit_bytes=limit_bytes,
            chat_template_kwargs=chat_template_kwargs,
        )


def _token_ids(prompt: PromptInput, weights: Weights, chat_template_kwargs: TemplateKwargs | None) -> list[int]:
    if _is_chat(prompt):
        return chat_prompt(prompt, weights.need_tokenizer(), chat_template_kwargs)  # type: ignore[arg-type]
    if chat_template_kwargs is not None:
        raise ConfigError("chat_template_kwargs needs a list of messages; no template is used for other prompts")
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError("the prompt is empty; write at least one character")
        check_characters(prompt)
        return [int(token) for token in weights.need_tokenizer()(prompt).input_ids]
    if isinstance(prompt, Tensor):
        return [int(token) for token in one_prompt(prompt)]
    items = list(prompt) if isinstance(prompt, Sequence) else []
    if items and all(isinstance(item, int) for item in items):
        return [item for item in items if isinstance(item, int)]
    raise ConfigError("a prompt is a string, a non-empty list of messages, or a non-empty list of token ids")


def _is_chat(prompt: PromptInput) -> bool:
    """Whether a prompt is a list of messages."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _as_tuple(documents: Document | Sequence[Document]) -> tuple[Document, ...]:
    return (documents,) if isinstance(documents, Document) else tuple(documents)
