"""A needle in a haystack: a number that a long text mentions once, asked for at the end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from tidekv_llm.bench.corpus import corpus_text
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.fan_out import FanOut
from tidekv_llm.config import PrefillConfig
from tidekv_llm.decode.loop import DecodeAdapter, decode_tokens
from tidekv_llm.errors import ConfigError
from tidekv_llm.memory import MemoryMeter
from tidekv_llm.passages import Passages
from tidekv_llm.prefill.layer_major import run_layer_major
from tidekv_llm.prefill.task import PrefillTask
from tidekv_llm.request import Request

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV

WHO = (
    "The gardener", "An old sailor", "My neighbour", "The young teacher", "A quiet traveller", "The baker",
    "Her brother", "The painter", "A tired clerk", "The shepherd", "Our guide",
)  # fmt: skip
DID = (
    "walked slowly", "told a long story", "looked for shelter", "sang an old song", "waited for the rain to stop",
    "sat down to rest", "watched the clouds", "ate some bread", "read a letter", "mended a broken chair",
    "thought about the summer", "spoke with a friend", "counted the birds",
)  # fmt: skip
WHERE = (
    "near the river", "behind the church", "at the edge of the forest", "in the market square",
    "beside the old bridge", "on the way home", "under the chestnut trees",
)  # fmt: skip
NOISE = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
)  # fmt: skip
# One sentence of letters alone, 31 to 200 characters of it.
PLAIN_SENTENCE = re.compile(r"[A-Z][A-Za-z ,'-]{29,198}\.")

QUESTION = "What is the secret number mentioned in the text?"
ANSWER_TOKENS = 24


def _prose(number: int) -> str:
    """One of 11 * 13 * 7 sentences; neighbours share no part."""
    return f"{WHO[number % len(WHO)]} {DID[number % len(DID)]} {WHERE[number % len(WHERE)]}."


def _noise(number: int) -> str:
    """Five sentences over and over, the usual padding of such tests."""
    return NOISE[number % len(NOISE)]


def _manual(number: int) -> str:
    """Sentences of a technical manual (:mod:`tidekv_llm.bench.corpus`), none of them about a number."""
    sentences = _manual_sentences()
    return sentences[number % len(sentences)]


@cache
def _manual_sentences() -> tuple[str, ...]:
    text = re.sub(r"[*`]", "", re.sub(r"\s+", " ", corpus_text()))
    found = (sentence for sentence in re.split(r"(?<=\.) ", text) if PLAIN_SENTENCE.fullmatch(sentence))
    return tuple(sentence for sentence in found if "number" not in sentence)


# What "manual" says can change with the release of Python: its text comes with the interpreter.
HAYSTACKS: dict[str, Callable[[int], str]] = {"prose": _prose, "noise": _noise, "manual": _manual}


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt and the number it hides.

    Attributes:
        token_ids: the whole chat prompt.
        number: its digits.
        depth: where it lies, from 0 (start) to 1 (end).
    """

    token_ids: list[int]
    number: str
    depth: float


def make_needle(
    llm: TideKV, prompt_tokens: int, depth: float, number: str = "7422361", haystack: str = "prose"
) -> Needle:
    """A chat prompt with the number at ``depth``, at most ``prompt_tokens`` tokens and less than a sentence below.

    Args:
        llm: an engine with a tokenizer.
        prompt_tokens: length of the whole prompt.
        depth: where the number lies among the sentences, from 0 to 1.
        number: what is hidden.
        haystack: one of :data:`HAYSTACKS`.

    Raises:
        ConfigError: the question alone is longer.
    """
    tokenizer = llm.tokenizer
    assert tokenizer is not None

    def prompt(before: Sequence[str], after: Sequence[str]) -> list[int]:
        text = " ".join([*before, f"The secret number is {number}.", *after])
        return llm.encode([{"role": "user", "content": f"{text}\n\n{QUESTION}"}])

    room = prompt_tokens - len(prompt((), ()))
    if room < 0:
        raise ConfigError(f"prompt_tokens={prompt_tokens} is too few: the question takes {prompt_tokens - room}")
    sentences: list[str] = []
    for index in itertools.count():
        sentence = HAYSTACKS[haystack](index)
        room -= len(tokenizer(f" {sentence}", add_special_tokens=False).input_ids)
        if room < 0:
            break
        sentences.append(sentence)
    place = round(depth * len(sentences))
    return Needle(prompt(sentences[:place], sentences[place:]), number, depth)


@torch.no_grad()
def answers(
    llm: TideKV,
    token_ids: Sequence[int],
    configs: Sequence[PrefillConfig],
    *,
    new_tokens: int = ANSWER_TOKENS,
    chunk_size: int = 1024,
) -> list[str]:
    """One prefill and, from the cache that each configuration keeps, the beginning of the answer.

    All configurations see the same full layers, so their answers differ by what was kept alone.
    """
    tokenizer, decoder = llm.tokenizer, llm.decoder
    assert tokenizer is not None
    ids, full = torch.tensor([list(token_ids)]), decoder.full_layers
    sizes = (decoder.num_layers, len(token_ids), new_tokens, full, Passages.of(tokenizer, token_ids))
    fan_out = FanOut([Compressor(config, *sizes) for config in configs])
    with MemoryMeter(decoder.device, weights=0) as meter:
        task = PrefillTask(PrefillConfig(), Request(), meter)
        hidden = run_layer_major(decoder, ids, task, fan_out, chunk_size=chunk_size).hidden
    logits, attention = decoder.logits(hidden[:, -1])[0], decoder.attention("auto")
    texts = []
    for kept in fan_out.caches:
        adapter = DecodeAdapter(decoder, kept, attention)
        tokens = decode_tokens(adapter.step, logits, lambda row: int(row.argmax()), max_new_tokens=new_tokens)
        answer = list(itertools.takewhile(lambda token: token != tokenizer.eos_token_id, tokens))
        texts.append(tokenizer.decode(answer))
    return texts
