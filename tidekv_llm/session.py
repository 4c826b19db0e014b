"""Document sessions: read a document once, ask many questions, each with its own full-prompt-aware selection.

While a layer is active its full keys and values pass by anyway: they are copied to a store as the layer ends. A later
question runs only its own tokens; per layer the document's keys and values come back, the question attends to all of
them, the selector scores with this question's window, and the layer is evicted again. The answer is what a fresh
prefill gives, at the price of reading the KV instead of computing S^2 attention, and the device still never holds
more than one full layer.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tidekv_llm.documents import DEFAULT_INSTRUCTIONS, Document, Prompt, build_prompt, document_ends
from tidekv_llm.engine import Answer, AnswerStream, TideKV, _options
from tidekv_llm.errors import ClosedError, ConfigError
from tidekv_llm.request import ProgressCallback, Request
from tidekv_llm.store import DiskStore, MemoryStore, PrefixStore, StorePool
from tidekv_llm.store.named import session_folder
from tidekv_llm.store.reuse import PromptIdentity, Reuse, reusable

if TYPE_CHECKING:
    from tidekv_llm.documents.prompt import HistoryTurn

STORES = ("memory", "disk")
# Any question does for laying out the document part, which no question changes.
_ANY_QUESTION = "?"


class Session:
    """Documents that stay open; made by :meth:`TideKV.open`.

    Args:
        engine: answers; the session keeps its weights in memory until it is closed.
        documents: in the order they go into the prompt.
        store: ``"memory"`` or ``"disk"``.
        name: of a session on disk.
        instructions: instead of the default ones.
        int8: store 8-bit integers (memory only).

    Raises:
        ConfigError: an option is unknown or does not go with another.
        ContextOverflowError: the documents alone do not fit.
    """

    def __init__(
        self,
        engine: TideKV,
        documents: Sequence[Document],
        *,
        store: str = "memory",
        name: str | None = None,
        instructions: str | None = None,
        int8: bool = False,
    ) -> None:
        if store not in STORES:
            raise ConfigError(f"store={store!r} is unknown; choose one of {', '.join(STORES)}")
        if int8 and store != "memory":
            raise ConfigError("int8=True needs store='memory'; files hold the exact numbers")
        if name is not None and store != "disk":
            raise ConfigError(f"name={name!r} needs store='disk'; a session in memory has no name to be found by")
        self._instructions = DEFAULT_INSTRUCTIONS if instructions is None else instructions
        self._unnamed = int(len(documents) == 1)
        self._documents = tuple(documents)
        prompt = self._prompt(engine, _ANY_QUESTION, (), 0)
        # An "auto" chunk size is settled now: another one would mean other rounding, and so another store.
        self._engine = engine.with_prefill(chunk_size=engine._chunk_size(len(prompt.token_ids)))
        folder = session_folder(name) if store == "disk" else None
        self._prefix = _SessionPrefix(engine._open().pool, folder, int8=int8)
        self._prefix.document = prompt.token_ids[: prompt.document_end]
        self._history: list[HistoryTurn] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def documents(self) -> tuple[Document, ...]:
        """What is open."""
        return self._documents

    @property
    def history(self) -> list[HistoryTurn]:
        """The (question, answer) pairs that later questions see."""
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
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> Answer:
        """Answer a question; the arguments are those of :meth:`TideKV.ask`, and one more.

        With ``remember`` the earlier turns are part of the prompt, after the documents, and this one joins them.

        Raises:
            ContextOverflowError: documents, history and question do not fit.
            Cancelled: ``cancel`` was set; the session can be used again.
            ClosedError: the session was closed.
        """
        return self._stream(
            question, remember, max_new_tokens, temperature, top_p, top_k, stop, seed, progress, cancel
        ).drain(on_text)

    def stream(
        self,
        question: str,
        *,
        remember: bool = True,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int | None = None,
        progress: ProgressCallback | None = None,
        cancel: threading.Event | None = None,
    ) -> AnswerStream:
        """Like :meth:`ask`, as text deltas; the stream's ``answer`` is there at the end."""
        return self._stream(
            question, remember, max_new_tokens, temperature, top_p, top_k, stop, seed, progress, cancel
        )

    def ingest(
        self, *, progress: ProgressCallback | None = None, cancel: threading.Event | None = None
    ) -> None:
        """Read the documents now, so that the first question is as quick as the later ones."""
        self._check_open()
        engine, ids = self._engine, self._prefix.document
        prompt = self._prompt(engine, _ANY_QUESTION, (), 0)
        request = Request(progress, cancel)
        engine._prefill(
            engine._check_ids(ids), request, boundaries=document_ends(prompt), reserve=0, prefix=self._prefix
        )

    def append(self, document: Document) -> None:
        """Add a document after the others; what was read of them is reused.

        Raises:
            ContextOverflowError: all together do not fit; the session stays as it was.
        """
        self._check_open()
        before = self._documents
        self._documents = (*before, document)
        try:
            prompt = self._prompt(self._engine, _ANY_QUESTION, (), 0)
        except Exception:
            self._documents = before
            raise
        self._prefix.document = prompt.token_ids[: prompt.document_end]

    def forget(self) -> None:
        """Drop the history; the documents stay."""
        self._history.clear()

    def close(self) -> None:
        """Free the store in memory (files on disk stay) and let go of the weights."""
        if not self._closed:
            self._closed = True
            self._prefix.close()
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------

    def _stream(
        self,
        question: str,
        remember: bool,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop: Sequence[str],
        seed: int | None,
        progress: ProgressCallback | None,
        cancel: threading.Event | None,
    ) -> AnswerStream:
        self._check_open()
        options = _options(max_new_tokens, temperature, top_p, top_k, stop, seed)
        prompt = self._prompt(self._engine, question, self._history if remember else (), max_new_tokens)
        deltas = self._engine._answer(self._documents, prompt, options, Request(progress, cancel), self._prefix)
        if not remember:
            return AnswerStream(deltas)

        def remembering() -> Any:
            answer = yield from deltas
            self._history.append((question, answer.text))
            return answer

        return AnswerStream(remembering())

    def _prompt(
        self, engine: TideKV, question: str, history: Sequence[HistoryTurn], answer_reserve: int
    ) -> Prompt:
        return build_prompt(
            self._documents,
            question,
            engine._need_tokenizer(),
            history=history,
            limit=engine.context_window,
            answer_reserve=answer_reserve,
            unnamed=self._unnamed,
            instructions=self._instructions,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this session was closed; open the documents again")


class _SessionPrefix:
    """The session's own store: found by its exact document part, never shared with another session in memory."""

    def __init__(self, pool: StorePool, folder: Path | None, *, int8: bool) -> None:
        self.document: tuple[int, ...] = ()
        self._pool, self._folder, self._int8 = pool, folder, int8
        # Two sessions on the same document must not be able to tell by the time it takes.
        self._salt = "" if folder else uuid.uuid4().hex
        self._store: PrefixStore | None = None

    @property
    def nbytes(self) -> int:
        return self._store.nbytes if self._store is not None and self._store.complete else 0

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> Reuse:
        """Read the store if it is there; else fill one, starting from what an earlier, shorter one holds."""
        had_one = self._store is not None and self._store.complete
        store = self._find(identity)
        if store is not None:
            return Reuse(store, reusable(store, store.length, len(token_ids), window_size))
        reuse = Reuse(writer=self._new_store(identity), on_finish=self._keep)
        shorter = self._store if had_one and self._is_prefix(identity) else None
        if shorter is not None:
            reuse.reader = shorter
            reuse.reused = reusable(shorter, shorter.length, len(token_ids), window_size)
        elif had_one:
            reuse.notes.append("the stored document had been evicted to stay below the limit; it was read again")
        return reuse

    def drop(self, store: PrefixStore) -> None:
        self._pool.remove(store.key)
        store.discard()
        self._store = None

    def close(self) -> None:
        if self._store is not None:
            self._pool.remove(self._store.key)
            if self._store.kind == "memory":
                self._store.discard()
            self._store = None

    def _find(self, identity: PromptIdentity) -> PrefixStore | None:
        key = identity.key(self.document, self._salt)
        if self._folder is None:
            return self._pool.get(key)
        if self._store is not None and self._store.key == key and self._store.complete:
            return self._store
        found = DiskStore.find(key, self.document, identity.num_layers, root=self._folder)
        if found is not None:
            self._store = found
        return found

    def _is_prefix(self, identity: PromptIdentity) -> bool:
        """Whether the store from before :meth:`Session.append` still serves: there, and of the same numbers."""
        store = self._store
        if store is None or store.length >= len(self.document):
            return False
        same = (store.key.model, store.key.numerics) == (identity.model, identity.numerics)
        there = store.kind == "disk" or self._pool.get(store.key) is not None
        return same and there and self.document[: store.length] == store.token_ids

    def _new_store(self, identity: PromptIdentity) -> PrefixStore:
        key = identity.key(self.document, self._salt)
        if self._folder is not None:
            return DiskStore(key, self.document, identity.num_layers, root=self._folder)
        return MemoryStore(key, self.document, identity.num_layers, int8=self._int8)

    def _keep(self, store: PrefixStore) -> None:
        before, self._store = self._store, store
        if store.kind == "memory":
            self._pool.add(store)
        if before is not None and before.key != store.key:
            self._pool.remove(before.key)
