"""A byte-level tokenizer: every byte is a token, so characters and stop strings straddle tokens."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins, in the order of the bytes 0..255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@functools.cache
def byte_tokenizer(*merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """Ids 0..2 are special, id 3 + b is byte b, then one id per merge (of ASCII texts)."""
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *byte_alphabet()))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def ids_of(text: str) -> list[int]:
    """One token per byte."""
    return [3 + byte for byte in text.encode()]
