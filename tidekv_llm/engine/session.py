"""Document sessions: read a document once, ask many questions, each with its own full-prompt-aware selection.

While a layer is active its full keys and values pass by anyway: they are copied to a store as the layer ends. A later
question runs only its own tokens; per layer the document's keys and values come back, the question attends to all of
them, the selector scores with this question's window, and the layer is evicted again. The answer is what a fresh
prefill gives, at the price of reading the KV instead of computing S^2 attention, and the device still never holds
more than one full layer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self, Unpack

from tidekv_llm.config import AUTO_CHUNK, whole_number
from tidekv_llm.documents import DEFAULT_INSTRUCTIONS, Document, DocumentLayout, lay_out
from tidekv_llm.engine.answers import Answer, AnswerStream, Deltas, OnText
from tidekv_llm.engine.session_prefix import SessionPrefix
from tidekv_llm.engine.together import OnAnswer, Outcome, answer_together
from tidekv_llm.errors import ClosedError, ConfigError
from tidekv_llm.options import GenerationOptions, settle
from tidekv_llm.planner import CHUNK_SIZES
from tidekv_llm.prefixes.base import digest_ids
from tidekv_llm.prefixes.named import session_folder
from tidekv_llm.request import ProgressCallback, Request

if TYPE_CHECKING:
    from tidekv_llm.documents.prompt import HistoryTurn
    from tidekv_llm.documents.template import TemplateKwargs
    from tidekv_llm.engine.run import Begun, Run
    from tidekv_llm.options import Settled

STORES = ("memory", "disk")
# Answers decoded as one batch: the linear maps of eight cost little more than those of one.
TOGETHER = 8


class Session:
    """Documents that stay open; made by :meth:`TideKV.open`.

    Args:
        run: answers; the session keeps its weights in memory until it is closed.
        documents: in the order they go into the prompt.
        store: ``"memory"`` or ``"disk"``.
        name: of a session on disk.
        instructions: instead of the default ones.
        int8: store 8-bit integers (memory only).
        limit_bytes: most bytes of all sessions' stores; the least recently used documents go first.
        chat_template_kwargs: values for the chat template's own names, in every prompt.

    Raises:
        ConfigError: an option is unknown or does not go with another.
        ContextOverflowError: the documents alone do not fit.
    """

    def __init__(
        self,
        run: Run,
        documents: Sequence[Document],
        *,
        store: str = "memory",
        name: str | None = None,
        instructions: str | None = None,
        int8: bool = False,
        limit_bytes: int | None = None,
        chat_template_kwargs: TemplateKwargs | None = None,
    ) -> None:
        _check_options(store, name, int8, limit_bytes)
        weights = run.hold.get()
        self._instructions = DEFAULT_INSTRUCTIONS if instructions is None else instructions
        self._chat_template_kwargs = chat_template_kwargs
        self._unnamed = int(len(documents) == 1)
        self._documents = tuple(documents)
        self._layout = self._lay_out(run, self._documents)
        if store == "memory" and limit_bytes is not None:
            weights.pool.limit_bytes = limit_bytes
        folder = session_folder(name) if store == "disk" else None
        self._prefix = SessionPrefix(weights.pool, folder, int8=int8, limit_bytes=limit_bytes)
        self._prefix.document = self._layout.token_ids
        # An "auto" chunk size is settled now: another one would mean other rounding, and so another store.
        settled = self._as_stored(run) or run.settled(len(self._layout))
        self._run = run.with_config(settled.config)
        self._history: list[HistoryTurn] = []
        self._closed = False

    @property
    def documents(self) -> tuple[Document, ...]:
        """What is open."""
        return self._documents

    @property
    def history(self) -> list[HistoryTurn]:
        """The (question, answer) pairs that later questions see; set it to go on with an earlier conversation."""
        return list(self._history)

    @history.setter
    def history(self, turns: Sequence[HistoryTurn]) -> None:
        self._history = [(str(question), str(answer)) for question, answer in turns]

    @property
    def document_tokens(self) -> int:
        """Tokens of the document part of the prompt."""
        return len(self._prefix.document)

    @property
    def store_bytes(self) -> int:
        """Bytes of the document's keys and values in host memory or on disk; 0 before the first question."""
        return self._prefix.nbytes

    def ask(
        self,
        question: str,
        *,
        remember: bool = True,
        on_text: OnText | None = None,
        on_reasoning: OnText | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Answer:
        """Answer a question; the arguments are those of :meth:`TideKV.ask`, and one more.

        With ``remember`` the earlier turns are part of the prompt, after the documents, and this one joins them.

        Raises:
            ContextOverflowError: documents, history and question do not fit.
            ConfigError: an option is unknown or impossible.
            Cancelled: ``cancel`` was set; the session can be used again.
            ClosedError: the session was closed.
        """
        stream = self.stream(question, remember=remember, progress=progress, cancel=cancel, **options)
        return stream.drain(on_text, on_reasoning)

    def stream(
        self,
        question: str,
        *,
        remember: bool = True,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AnswerStream:
        """Like :meth:`ask`, as text deltas; the stream's ``answer`` is there at the end."""
        self._check_open()
        settled = settle(options)
        prompt = self._layout.prompt(
            question,
            self._history if remember else (),
            limit=self._run.window,
            answer_reserve=settled.max_new_tokens,
        )
        deltas = self._run.answer(self._documents, prompt, settled, Request(progress, cancel), self._prefix)
        return AnswerStream(self._remembering(question, deltas) if remember else deltas)

    def ask_many(
        self,
        questions: Sequence[str],
        *,
        together: int = TOGETHER,
        on_answer: OnAnswer | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | Sequence[threading.Event | None] | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Outcome]:
        """Answer questions that know nothing of each other; their answers are decoded as one batch.

        Each gets the answer that :meth:`ask` with ``remember=False`` gives (in float32 the same text; in 16 bits the
        rounding of a batch can turn a near tie).

        Args:
            questions: what the user wants to know.
            together: most answers, and so caches, at a time.
            on_answer: called with a question's number and its outcome as it comes.
            progress: called after every chunk step of the prefills.
            cancel: set it to stop them all; a list has one, or None, for each question.
            **options: length, sampling and stops, the same for all.

        Returns:
            For each question its answer, or the :class:`TideKVError` that stopped it, in the order of asking.

        Raises:
            ConfigError: an option is unknown or impossible.
            ClosedError: the session was closed.
        """
        self._check_open()
        settled = settle(options)
        whole_number("together", together, least=1)
        if isinstance(questions, str):
            raise ConfigError(f"questions={questions!r} must be a list of strings; ask() takes a single one")
        cancels = list(cancel) if isinstance(cancel, Sequence) else [cancel] * len(questions)
        if len(cancels) != len(questions):
            raise ConfigError(f"cancel has {len(cancels)} events for {len(questions)} questions; give one for each")
        outcomes: dict[int, Outcome] = {}

        def tell(number: int, outcome: Outcome) -> None:
            outcomes[number] = outcome
            if on_answer is not None:
                on_answer(number, outcome)

        starts = [
            functools.partial(self._begin, question, settled, Request(progress, event))
            for question, event in zip(questions, cancels, strict=True)
        ]
        answer_together(starts, together, tell)
        return [outcomes[number] for number in range(len(questions))]

    def _begin(self, question: str, options: Settled, request: Request) -> Begun:
        reserve = options.max_new_tokens
        prompt = self._layout.prompt(question, (), limit=self._run.window, answer_reserve=reserve)
        return self._run.begin(self._documents, prompt, options, request, self._prefix)

    def ingest(self, *, progress: ProgressCallback | None = None, cancel: threading.Event | None = None) -> None:
        """Read the documents now, so that the first question is as quick as the later ones.

        Does nothing where no question could use it (a selector that needs the document's queries, say).
        """
        self._check_open()
        if self._run.obstacle_to_reuse(len(self._layout)):
            return
        layout, request = self._layout, Request(progress, cancel)
        self._run.prefill(self._run.input(layout.token_ids, request, boundaries=layout.ends, prefix=self._prefix))

    def append(self, document: Document) -> None:
        """Add a document after the others; what was read of them is reused.

        Raises:
            ContextOverflowError: all together do not fit; the session stays as it was.
        """
        self._check_open()
        documents = (*self._documents, document)
        self._layout = self._lay_out(self._run, documents)
        self._documents, self._prefix.document = documents, self._layout.token_ids

    @property
    def fingerprint(self) -> str:
        """Digest of the documents as this model reads them, instructions included."""
        return digest_ids(self._prefix.document)

    def forget(self) -> None:
        """Drop the history; the documents stay."""
        self._history.clear()

    def close(self) -> None:
        """Free the store in memory (files on disk stay) and let go of the weights."""
        if not self._closed:
            self._closed = True
            self._prefix.close()
            self._run.hold.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------

    def _remembering(self, question: str, deltas: Deltas[Answer]) -> Deltas[Answer]:
        answer = yield from deltas
        self._history.append((question, answer.text))
        return answer

    def _lay_out(self, run: Run, documents: Sequence[Document]) -> DocumentLayout:
        tokenizer = run.hold.get().need_tokenizer()
        layout = lay_out(
            documents,
            tokenizer,
            instructions=self._instructions,
            unnamed=self._unnamed,
            chat_template_kwargs=self._chat_template_kwargs,
        )
        layout.check(run.window)
        return layout

    def _as_stored(self, run: Run) -> Run | None:
        """An ``"auto"`` chunk size depends on the free memory of the day; one that has a store on disk goes on."""
        if run.config.chunk_size != AUTO_CHUNK or not self._prefix.on_disk:
            return None
        runs = (replace(run, config=run.config.replace(chunk_size=size)) for size in CHUNK_SIZES)
        return next((each for each in runs if self._prefix.exists(each.identity())), None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this session was closed; open the documents again")


def _check_options(store: str, name: str | None, int8: bool, limit_bytes: int | None) -> None:
    if store not in STORES:
        raise ConfigError(f"store={store!r} is unknown; choose one of {', '.join(STORES)}")
    if int8 and store != "memory":
        raise ConfigError("int8=True needs store='memory'; files hold the exact numbers")
    if name is not None and store != "disk":
        raise ConfigError(f"name={name!r} needs store='disk'; a session in memory has no name to be found by")
    if limit_bytes is not None:
        whole_number("limit_bytes", limit_bytes, least=1)
