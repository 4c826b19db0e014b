"""A needle in a haystack: a number that a long text mentions once, asked for at the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.fan_out import FanOut
from tidekv_llm.config import PrefillConfig
from tidekv_llm.decode.loop import DecodeAdapter, decode_tokens
from tidekv_llm.memory import MemoryMeter
from tidekv_llm.request import Request
from tidekv_llm.schedules import Job, make_schedule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
OVERHEAD_TOKENS = 80

QUESTION = "What is the secret number mentioned in the text?"
ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt and the number it hides.

    Attributes:
        token_ids: the whole chat prompt.
        number: seven digits.
        depth: where it lies, from 0 (start) to 1 (end).
    """

    token_ids: list[int]
    number: str
    depth: float


def make_needle(llm: TideKV, prompt_tokens: int, depth: float, number: str = "7422361") -> Needle:
    """A chat prompt of about ``prompt_tokens`` tokens with the number at ``depth``."""
    assert llm.tokenizer is not None
    sentences = _sentences(llm.tokenizer, prompt_tokens - OVERHEAD_TOKENS)
    place = round(depth * len(sentences))
    haystack = " ".join([*sentences[:place], f"The secret number is {number}.", *sentences[place:]])
    prompt = llm.encode([{"role": "user", "content": f"{haystack}\n\n{QUESTION}"}])
    return Needle(prompt, number, depth)


def _sentences(tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[str]:
    """Sentences of neutral prose, together just below so many tokens."""
    sentences: list[str] = []
    for number in itertools.count():
        tokens -= len(tokenizer(_sentence(number) + " ", add_special_tokens=False).input_ids)
        if tokens < 0:
            break
        sentences.append(_sentence(number))
    return sentences


def _sentence(number: int) -> str:
    """One of 11 * 13 * 7 sentences; neighbours share no part."""
    return f"{WHO[number % len(WHO)]} {DID[number % len(DID)]} {WHERE[number % len(WHERE)]}."


@torch.no_grad()
def answers(
    llm: TideKV, token_ids: Sequence[int], configs: Sequence[PrefillConfig], *, chunk_size: int = 1024
) -> list[str]:
    """One prefill and, from the cache that each configuration keeps, the beginning of the answer.

    All configurations see the same full layers, so their answers differ by what was kept alone.
    """
    tokenizer, decoder = llm.tokenizer, llm.decoder
    assert tokenizer is not None
    full = [index for index in range(decoder.num_layers) if decoder.sliding_window(index) is None]
    fan_out = FanOut(
        [Compressor(config, decoder.num_layers, len(token_ids), ANSWER_TOKENS, full) for config in configs]
    )
    attention, schedule = AttentionDispatch(), make_schedule("tidekv")
    with MemoryMeter(decoder.device, weights=0) as meter:
        job = Job(cast("Compressor", fan_out), attention, Request(), meter, chunk_size)
        _, hidden = schedule.prefill(decoder, torch.tensor([list(token_ids)]), job)
    logits = decoder.logits(hidden[:, -1])[0]
    texts = []
    for cache in fan_out.caches:
        adapter = DecodeAdapter(decoder, cache, attention)
        tokens = decode_tokens(adapter.step, logits, lambda row: int(row.argmax()), max_new_tokens=ANSWER_TOKENS)
        answer = list(itertools.takewhile(lambda token: token != tokenizer.eos_token_id, tokens))
        texts.append(tokenizer.decode(answer))
    return texts
