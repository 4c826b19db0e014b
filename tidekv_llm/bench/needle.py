"""A needle in a haystack: a number that a long text mentions once, asked for at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tidekv_llm.attention import AttentionDispatch
from tidekv_llm.bench.corpus import corpus_text
from tidekv_llm.compress.compressor import Compressor
from tidekv_llm.compress.fan_out import FanOut
from tidekv_llm.config import PrefillConfig
from tidekv_llm.decode.loop import DecodeAdapter, decode_tokens
from tidekv_llm.memory import MemoryMeter
from tidekv_llm.request import Request
from tidekv_llm.schedules import Job, make_schedule

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV

QUESTION = "What is the secret number? Answer with the number only."
ANSWER_TOKENS = 12


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
    sentence = f"\n\nThe secret number is {number}. Remember it.\n\n"
    text = corpus_text()[: prompt_tokens * 8]
    ids = llm.tokenizer(text, add_special_tokens=False).input_ids[: prompt_tokens - 80]
    lines = llm.tokenizer.decode(ids).split("\n\n")
    place = max(1, round(depth * len(lines)))
    haystack = "\n\n".join(lines[:place]) + sentence + "\n\n".join(lines[place:])
    prompt = llm.encode([{"role": "user", "content": f"{haystack}\n\n{QUESTION}"}])
    return Needle(prompt, number, depth)


@torch.no_grad()
def answers(
    llm: TideKV, token_ids: Sequence[int], configs: Sequence[PrefillConfig], *, chunk_size: int = 1024
) -> list[str]:
    """One prefill and, from the cache that each configuration keeps, the beginning of the answer.

    All configurations see the same full layers, so their answers differ by what was kept alone.
    """
    assert llm.tokenizer is not None
    decoder = llm.decoder
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
        texts.append(llm.tokenizer.decode(list(tokens), skip_special_tokens=True))
    return texts
