"""One request on a thread of its own, with its deltas handed to whoever waits, in a thread or on a loop.

A call runs on one thread from beginning to end, so that torch's thread-local modes never meet a ``yield``. The
consumer may vanish at any moment: then the request is cancelled and stops within one chunk step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidekv_llm.decode.reasoning import Delta
from tidekv_llm.errors import ConfigError, TideKVError
from tidekv_llm.options import DEFAULT_DRAFTS, GenerationOptions, settle
from tidekv_llm.service.joining import JoinableCall, Waiter
from tidekv_llm.service.messages import Message
from tidekv_llm.service.pool import EngineHandle

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV
    from tidekv_llm.metrics import Metrics

Emit = Callable[[Delta], None]
Start = Callable[["EngineHandle", Any, Callable[[Any], None], threading.Event], None]
ModelCall = Callable[["TideKV", Emit, threading.Event], "Reply"]

_ADJUSTMENTS = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
CALL_OPTIONS = (
    "max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "drafts", "chat_template_kwargs",
    *_ADJUSTMENTS,
)  # fmt: skip


class RequestTimeoutError(TideKVError, TimeoutError):
    """The request took longer than ``timeout`` seconds and was stopped."""


@dataclass(frozen=True)
class Reply:
    """A finished request.

    Args:
        text: the answer, cut before a stop string.
        finish_reason: ``"stop"`` or ``"length"``.
        metrics: times and bytes.
        model: the model's name.
        reasoning: what the model thought before, where it marks that.
        extra: more to report; plain JSON values.
    """

    text: str
    finish_reason: str
    metrics: Metrics
    model: str
    reasoning: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, under the names that most providers use."""
        prompt, new = self.metrics.prompt_tokens, self.metrics.new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def as_info(self) -> dict[str, Any]:
        """Everything but text and reasoning, as JSON values."""
        return {
            "model_name": self.model,
            "finish_reason": self.finish_reason,
            "token_usage": self.usage,
            "tidekv": self.metrics.as_dict(),
            **self.extra,
        }


# --- options and prompts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallOptions:
    """How one call is answered.

    Args:
        generation: length, sampling and stops.
        chat_template_kwargs: values for the chat template's own names, ``{"enable_thinking": False}`` say.
    """

    generation: GenerationOptions
    chat_template_kwargs: Mapping[str, Any] | None = None


def call_options(
    defaults: Mapping[str, Any], stop: str | Sequence[str] | None, overrides: Mapping[str, Any]
) -> CallOptions:
    """What the engine is called with: the object's own, changed by the call's; stop strings of both hold.

    Raises:
        ConfigError: an unknown name, an impossible value, or ``max_tokens`` and ``max_new_tokens`` at once.
    """
    unknown = [name for name in overrides if name not in CALL_OPTIONS]
    if unknown and unknown[0] in ("tools", "tool_choice", "functions", "function_call"):
        raise ConfigError(
            f"{unknown[0]}= is refused: these models cannot call tools; put what a tool said into a message"
        )
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; a call takes {', '.join(CALL_OPTIONS)} and stop")
    given = {name: value for name, value in overrides.items() if value is not None}
    if "max_tokens" in given and "max_new_tokens" in given:
        raise ConfigError("max_tokens and max_new_tokens are the same option; give one of them")
    own = (stop,) if isinstance(stop, str) else tuple(stop or ())
    options = GenerationOptions(
        max_new_tokens=given.get("max_tokens", given.get("max_new_tokens", defaults["max_tokens"])),
        stop=tuple(dict.fromkeys((*defaults["stop"], *own))),
        temperature=given.get("temperature", defaults["temperature"]),
        top_p=given.get("top_p", defaults["top_p"]),
        top_k=given.get("top_k", defaults["top_k"]),
        seed=given.get("seed", defaults["seed"]),
        drafts=DEFAULT_DRAFTS if (drafts := given.get("drafts", defaults.get("drafts"))) is None else drafts,
    )
    for name in _ADJUSTMENTS:
        if (value := given.get(name, defaults.get(name))) is not None:
            options[name] = value  # type: ignore[literal-required]
    settle(options)  # what cannot work is refused before it waits in a line
    return CallOptions(options, given.get("chat_template_kwargs", defaults.get("chat_template_kwargs")))


def generation_call(
    prompt: str | list[Message],
    options: CallOptions,
    *,
    chat_template: bool,
    plain: Callable[[], str] | None = None,
) -> ModelCall:
    """Continue a text or a conversation.

    Args:
        prompt: a text goes through the chat template as one user message; a list is a conversation.
        options: from :func:`call_options`.
        chat_template: False continues a text as it stands.
        plain: the conversation as one text, for a model without a chat template; None sends it messages all the same.
    """
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ConfigError("the prompt is empty; write at least one word")

    def call(engine: TideKV, emit: Emit, cancel: threading.Event) -> Reply:
        text = prompt if plain is None or getattr(engine.tokenizer, "chat_template", None) else plain()
        asked, template = as_prompt(engine, text, chat_template), options.chat_template_kwargs
        stream = engine.stream(asked, chat_template_kwargs=template, cancel=cancel, **options.generation)
        for part in stream.parts():
            emit(part)
        made = stream.generation
        assert made is not None
        return Reply(made.text, made.finish_reason, made.metrics, engine.name, made.reasoning)

    return call


def as_prompt(engine: TideKV, prompt: str | list[Message], chat_template: bool) -> list[Message] | list[int]:
    """A conversation, or ids with exactly one beginning-of-sequence token, where the model has one."""
    if not isinstance(prompt, str):
        return prompt
    if chat_template and getattr(engine.tokenizer, "chat_template", None):
        return [{"role": "user", "content": prompt}]
    return _single_bos(engine.encode(prompt), getattr(engine.tokenizer, "bos_token_id", None))


def _single_bos(ids: list[int], bos: int | None) -> list[int]:
    """A text that spells the token itself gets a second one from the tokenizer."""
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids


# --- running ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Failed:
    error: BaseException


def _start(handle: EngineHandle, call: ModelCall, put: Callable[[Any], None], cancel: threading.Event) -> None:
    """Take a place in the model's line; ``put`` gets the call's deltas, then a Reply or a _Failed, whatever happens."""
    ticket = handle.join()

    def work() -> None:
        try:
            with handle.turn(ticket, cancel) as engine:
                put(call(engine, put, cancel))
        except BaseException as error:  # whoever waits must hear of it, or waits for ever
            put(_Failed(error))

    threading.Thread(target=work, name="tidekv").start()


def _start_joinable(
    handle: EngineHandle, call: JoinableCall, put: Callable[[Any], None], cancel: threading.Event
) -> None:
    """:func:`_start` for a call whose deltas nobody wants: it may be answered together with others of its kind."""
    ticket, waiter = handle.join(), _Told(call, cancel, put)
    handle.companions.add(waiter)

    def work() -> None:
        waiters: Sequence[Waiter] = [waiter]
        try:
            with handle.turn(ticket, cancel) as engine:
                waiters = handle.companions.claim(waiter)
                if len(waiters) == 1:
                    put(call(engine, put, cancel))
                elif waiters:
                    call.together(engine, waiters, lambda number, told: _tell(waiters[number], told))
        except BaseException as error:
            handle.companions.leave(waiter)
            for each in waiters:
                _tell(each, error)

    threading.Thread(target=work, name="tidekv").start()


@dataclass(eq=False)
class _Told(Waiter):
    """A waiter and what its caller reads from."""

    put: Callable[[Any], None]


def _tell(waiter: Waiter, told: Any) -> None:
    assert isinstance(waiter, _Told)
    waiter.put(_Failed(told) if isinstance(told, BaseException) else told)


def iterate(
    handle: EngineHandle, call: ModelCall, timeout: float | None = None, *, start: Start = _start
) -> Iterator[Delta | Reply]:
    """Yield pieces of answer and reasoning, and at last the Reply.

    Raises:
        RequestTimeoutError: ``timeout`` seconds passed before the end.
        TideKVError: whatever the call raised.
    """
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    cancel = threading.Event()
    deadline = None if timeout is None else time.monotonic() + timeout
    start(handle, call, items.put, cancel)
    try:
        while True:
            try:
                item = items.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise _timed_out(timeout) from None
            yield _raised(item)
            if isinstance(item, Reply):
                return
    finally:
        cancel.set()


async def aiterate(
    handle: EngineHandle, call: ModelCall, timeout: float | None = None, *, start: Start = _start
) -> AsyncIterator[Delta | Reply]:
    """:func:`iterate` for an event loop, which it never blocks; a cancelled task cancels the request."""
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Any] = asyncio.Queue()
    cancel = threading.Event()

    def put(item: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(items.put_nowait, item)

    deadline = None if timeout is None else loop.time() + timeout
    start(handle, call, put, cancel)
    try:
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    item = await items.get()
            except TimeoutError:
                raise _timed_out(timeout) from None
            yield _raised(item)
            if isinstance(item, Reply):
                return
    finally:
        cancel.set()


def run(handle: EngineHandle, call: ModelCall, timeout: float | None = None) -> Reply:
    """The Reply of a call; raises as :func:`iterate`."""
    *_, reply = iterate(handle, call, timeout, start=_start_of(call))
    assert isinstance(reply, Reply)
    return reply


async def arun(handle: EngineHandle, call: ModelCall, timeout: float | None = None) -> Reply:
    """:func:`run` for an event loop."""
    *_, reply = [item async for item in aiterate(handle, call, timeout, start=_start_of(call))]
    assert isinstance(reply, Reply)
    return reply


def _start_of(call: ModelCall) -> Start:
    return _start_joinable if isinstance(call, JoinableCall) else _start


def _raised(item: Any) -> Delta | Reply:
    if isinstance(item, _Failed):
        raise item.error
    assert isinstance(item, Delta | Reply)
    return item


def _timed_out(timeout: float | None) -> RequestTimeoutError:
    return RequestTimeoutError(f"no answer within timeout={timeout:g} s; raise it or shorten the prompt")
