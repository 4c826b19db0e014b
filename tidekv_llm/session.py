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

from tidekv_llm.config import AUTO_CHUNK
from tidekv_llm.documents import DEFAULT_INSTRUCTIONS, Document, Prompt, build_prompt, document_ends
from tidekv_llm.engine import Answer, AnswerStream, TideKV, _options
from tidekv_llm.errors import CacheError, ClosedError, ConfigError
from tidekv_llm.planner import CHUNK_SIZES
from tidekv_llm.prefixes.base import StoredPrefix, digest_ids
from tidekv_llm.prefixes.disk import DiskPrefix
from tidekv_llm.prefixes.memory import MemoryPrefix
from tidekv_llm.prefixes.named import session_folder, shrink
from tidekv_llm.prefixes.pool import PrefixPool
from tidekv_llm.prefixes.reuse import PromptIdentity, Reuse, reusable
from tidekv_llm.request import ProgressCallback, Request

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
        limit_bytes: most bytes of all sessions' files; the least recently used documents go first (disk only).

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
        limit_bytes: int | None = None,
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
        folder = session_folder(name) if store == "disk" else None
        self._prefix = _SessionPrefix(engine._open().pool, folder, int8=int8, limit_bytes=limit_bytes)
        self._prefix.document = prompt.token_ids[: prompt.document_end]
        # An "auto" chunk size is settled now: another one would mean other rounding, and so another store.
        chunk_size = self._stored_chunk_size(engine) or engine._chunk_size(len(prompt.token_ids))
        self._engine = engine.with_prefill(chunk_size=chunk_size)
        self._history: list[HistoryTurn] = []
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
        return self._stream(question, remember, max_new_tokens, temperature, top_p, top_k, stop, seed, progress, cancel)

    def ingest(self, *, progress: ProgressCallback | None = None, cancel: threading.Event | None = None) -> None:
        """Read the documents now, so that the first question is as quick as the later ones.

        Does nothing where no question could use it (a selector that needs the document's queries, say).
        """
        self._check_open()
        engine, ids = self._engine, self._prefix.document
        if engine._obstacle_to_reuse(len(ids)):
            return
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

    @property
    def fingerprint(self) -> str:
        """Digest of the documents as this model reads them, instructions included."""
        return digest_ids(self._prefix.document)

    def resume(self, history: Sequence[HistoryTurn]) -> None:
        """Go on with an earlier conversation: (question, answer) pairs, instead of what was asked here."""
        self._history[:] = [(str(question), str(answer)) for question, answer in history]

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

    def _prompt(self, engine: TideKV, question: str, history: Sequence[HistoryTurn], answer_reserve: int) -> Prompt:
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

    def _stored_chunk_size(self, engine: TideKV) -> int | None:
        """An ``"auto"`` chunk size depends on the free memory of the day; one that has a store on disk goes on."""
        if engine.config.chunk_size != AUTO_CHUNK or not self._prefix.on_disk:
            return None
        return next((size for size in CHUNK_SIZES if self._prefix.exists(engine._identity(size))), None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this session was closed; open the documents again")


class _SessionPrefix:
    """The session's own store: found by its exact document part, never shared with another session in memory."""

    def __init__(self, pool: PrefixPool, folder: Path | None, *, int8: bool, limit_bytes: int | None) -> None:
        self.document: tuple[int, ...] = ()
        self._pool, self._folder, self._int8, self._limit_bytes = pool, folder, int8, limit_bytes
        # Two sessions on the same document must not be able to tell by the time it takes.
        self._salt = "" if folder else uuid.uuid4().hex
        self._store: StoredPrefix | None = None
        self._closed = False

    @property
    def on_disk(self) -> bool:
        return self._folder is not None

    @property
    def nbytes(self) -> int:
        return self._store.nbytes if self._store is not None and self._store.complete else 0

    def exists(self, identity: PromptIdentity) -> bool:
        """Whether there is a folder for the documents on disk."""
        return self._folder is not None and (self._folder / identity.key(self.document).digest).is_dir()

    def plan(
        self, token_ids: Sequence[int], boundaries: Sequence[int], window_size: int, identity: PromptIdentity
    ) -> Reuse:
        """Read the store if it is there; else fill one, starting from what an earlier, shorter one holds."""
        if self._closed:  # by another thread: nothing may be stored any more
            return Reuse()
        before, notes = self._store, list[str]()
        try:
            store = self._find(identity)
        except CacheError as error:
            store, notes = None, [f"{error}; it was read again"]
        if store is not None:
            return Reuse(store, reusable(store, store.length, len(token_ids), window_size))
        reuse = Reuse(writer=self._new_store(identity), on_finish=self._keep, notes=notes)
        if before is not None and self._is_prefix(before, identity):
            reuse.reader = before
            reuse.reused = reusable(before, before.length, len(token_ids), window_size)
        elif before is not None and not notes:
            reuse.notes.append(
                "the stored document was evicted (a limit on bytes) or removed meanwhile; it was read again"
            )
        return reuse

    def drop(self, store: StoredPrefix) -> None:
        self._pool.remove(store.key)
        store.discard()
        self._store = None

    def close(self) -> None:
        """Let go of the store. A question that another thread has in work may read on: it holds the memory itself."""
        self._closed = True
        if self._store is not None:
            self._pool.remove(self._store.key)
            self._store = None

    def _find(self, identity: PromptIdentity) -> StoredPrefix | None:
        key = identity.key(self.document, self._salt)
        if self._folder is None:
            return self._pool.get(key)
        if self._store is not None and self._store.key == key and self._store.complete and self.exists(identity):
            return self._store
        found = DiskPrefix.find(key, self.document, identity.num_layers, root=self._folder)
        self._store = found or self._store
        return found

    def _is_prefix(self, store: StoredPrefix, identity: PromptIdentity) -> bool:
        """Whether the store from before :meth:`Session.append` still serves: there, and of the same numbers."""
        same = (store.key.model, store.key.numerics) == (identity.model, identity.numerics)
        there = store.complete and store.length < len(self.document)
        return same and there and self.document[: store.length] == store.token_ids

    def _new_store(self, identity: PromptIdentity) -> StoredPrefix:
        key = identity.key(self.document, self._salt)
        if self._folder is not None:
            return DiskPrefix(key, self.document, identity.num_layers, root=self._folder)
        limit_bytes = self._pool.limit_bytes
        return MemoryPrefix(key, self.document, identity.num_layers, int8=self._int8, limit_bytes=limit_bytes)

    def _keep(self, store: StoredPrefix) -> None:
        before, self._store = self._store, None if self._closed else store
        if before is not None and before.key != store.key:
            self._pool.remove(before.key)
        if isinstance(store, DiskPrefix):
            if self._limit_bytes is not None:
                shrink(self._limit_bytes, keep=store.folder)
        elif not self._closed:
            self._pool.add(store)
