"""How an answer is generated: the keywords that every call takes, and their checks, once.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from tidekv_llm.config import whole_number
from tidekv_llm.errors import ConfigError

DEFAULT_DRAFTS = 16
# What a torch generator takes.
_LEAST_SEED, _GREATEST_SEED = -(2**63), 2**64 - 1


class GenerationOptions(TypedDict, total=False):
    """Keywords of ``ask``, ``generate`` and ``stream``, of the engine and of its sessions.

    Attributes:
        max_new_tokens: longest answer in tokens, 256 by default; counted against the context window.
        temperature: 0, the default, takes the most likely token; above 0 divides the logits.
        top_p: draw from the smallest set of tokens whose probability reaches this; 1, the default, keeps all.
        top_k: draw from that many most likely tokens; 0, the default, keeps all.
        stop: strings at whose first occurrence the text is cut.
        seed: makes sampling repeatable; None, the default, draws a fresh one.
        drafts: most tokens that the document's own wording may suggest per step, which one step checks; 0 for none.
            It changes no text, only how fast quotations come.
        min_p: keep tokens that are at least this share of the most likely one's probability; 0, the default, keeps all.
        repetition_penalty: above 1 makes tokens that the answer has less likely, by dividing or multiplying their
            logits (CTRL, arXiv 1909.05858); 1, the default, changes none. The documents' tokens do not count: answers
            quote them.
        presence_penalty: taken off the logit of each token that the answer has; from -2 to 2, 0 by default.
        frequency_penalty: taken off once for each time that the answer has it; from -2 to 2, 0 by default.
        logit_bias: token id -> what is added to its logit.
        grammar: called once per answer; makes a function of the answer's ids int64 [1, n] and the logits [1, vocab]
            that returns logits, those of forbidden tokens minus infinity (any ``LogitsProcessor`` of transformers is
            one). It is called once for each token, in order.
        logprobs: report each token's log-probability by the model's own logits, and those of this many most likely
            tokens, 0 to 20; None, the default, reports none.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: str | Sequence[str]
    seed: int | None
    drafts: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    grammar: Callable[[], Callable[..., Any]] | None
    logprobs: int | None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from its logits.

    Args:
        temperature: 0 takes the most likely token; above 0 divides the logits.
        top_p: smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: that many most likely tokens; 0 keeps all.
        seed: makes draws repeatable; None draws a fresh one.
        min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, grammar: see
            :class:`GenerationOptions`.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Callable[[], Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature={self.temperature} must be at least 0; 0 takes the most likely token")
        _number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be above 0 and at most 1; 1 keeps all tokens")
        if not _is_whole(self.top_k) or self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k!r} must be a whole number of at least 0; 0 keeps all tokens")
        if self.seed is not None and not (_is_whole(self.seed) and _LEAST_SEED <= self.seed <= _GREATEST_SEED):
            raise ConfigError(f"seed={self.seed!r} must be a whole number below 2**64, or None for a fresh one")
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        _within("min_p", self.min_p, 0, 1, "0 keeps all tokens")
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100, "1 changes nothing")
        _within("presence_penalty", self.presence_penalty, -2, 2, "0 changes nothing")
        _within("frequency_penalty", self.frequency_penalty, -2, 2, "0 changes nothing")
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias={self.logit_bias!r} must be a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            if not _is_whole(token) or token < 0:
                raise ConfigError(f"logit_bias has {token!r}; its keys must be token ids")
            _within(f"logit_bias[{token}]", bias, -1e4, 1e4, "0 changes nothing")
        if self.grammar is not None and not callable(self.grammar):
            raise ConfigError(f"grammar={self.grammar!r} must be a function that makes a logits processor")


@dataclass(frozen=True, slots=True)
class Settled:
    """Checked options of one generation.

    Attributes:
        max_new_tokens: most tokens to generate.
        sampling: how they are drawn.
        stop: strings at whose first occurrence the text is cut.
        ignore_eos: go on past the end of sequence, to exactly ``max_new_tokens``.
        drafts: most tokens that are drafted per step; 0 for none.
        logprobs: alternatives to report the log-probabilities of, besides each token's own; None reports nothing.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool
    drafts: int = 0
    logprobs: int | None = None

    def stopping(self, *texts: str) -> Settled:
        """The same, and these texts end the answer as well."""
        return replace(self, stop=(*self.stop, *(text for text in texts if text)))


def settle(options: GenerationOptions, *, ignore_eos: bool = False) -> Settled:
    """Check what a call was given, and fill in the defaults.

    Raises:
        ConfigError: a name is unknown or a value impossible.
    """
    known = GenerationOptions.__annotations__
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; the options are {', '.join(known)}")
    given: dict[str, Any] = dict(options)
    max_new_tokens = given.pop("max_new_tokens", 256)
    whole_number("max_new_tokens", max_new_tokens, least=1)
    stop = _stop_strings(given.pop("stop", ()))
    drafts = given.pop("drafts", DEFAULT_DRAFTS)
    if not _is_whole(drafts) or drafts < 0:
        raise ConfigError(f"drafts={drafts!r} must be a whole number of at least 0; 0 drafts nothing")
    logprobs = given.pop("logprobs", None)
    if logprobs is not None and not (_is_whole(logprobs) and 0 <= logprobs <= 20):
        raise ConfigError(f"logprobs={logprobs!r} must be a whole number from 0 to 20, or None for none")
    return Settled(max_new_tokens, Sampling(**given), stop, ignore_eos, int(drafts), logprobs)


def _stop_strings(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop={stop!r} must be a string or a list of strings; leave it out for none")
    if not all(texts):
        raise ConfigError("a stop string is empty; leave it out")
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"stop string {text!r} holds half of a character; no model writes that")
    return tuple(texts)


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ConfigError(f"{name}={value!r} must be a number")


def _within(name: str, value: Any, least: float, most: float, neutral: str) -> None:
    _number(name, value)
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} must be from {least} to {most}; {neutral}")


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)
