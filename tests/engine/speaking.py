"""Engines that say a given text: the model's head follows a script, everything around it is real."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.decode.tokenizers_for_tests import byte_alphabet
from tests.tiny_models import tiny_model
from tidekv_llm import PrefillConfig, TideKV

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def speaker_tokenizer(template: str | None, special: tuple[str, ...] = (), added: tuple[str, ...] = ()) -> Any:
    """A byte is a token, and so is each of the special and the merely added spellings; ``</s>`` ends a sequence."""
    vocabulary = {text: number for number, text in enumerate(("</s>", *byte_alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("</s>", *special)])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


class Script:
    """Logits that make the model say one token after the other; it begins anew with every prompt.

    A call is a step of one token: drafts must be off (the fixture ``one_token_a_step``).
    """

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.tokens, self.vocabulary, self.said = tokens, vocabulary, 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.vocabulary)
        logits[..., self.tokens[self.said % len(self.tokens)]] = 1.0
        self.said += 1
        return logits


def speaking(
    said: str, template: str | None = CHATML, *, special: tuple[str, ...] = (), added: tuple[str, ...] = ()
) -> TideKV:
    """An engine that says ``said`` (special tokens included) and goes on with it from the start, if it may."""
    tokenizer = speaker_tokenizer(template, special, added)
    config = PrefillConfig(chunk_size=64, kept_tokens=64, window_size=8)
    engine = TideKV(tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096), tokenizer, prefill=config)
    script = Script(tokenizer(said, add_special_tokens=False)["input_ids"], len(tokenizer))
    engine._open().decoder.logits = script  # type: ignore[method-assign]
    return engine


def begin_again(engine: TideKV) -> None:
    """The next prompt is answered from the start of the text."""
    engine._open().decoder.logits.said = 0  # type: ignore[attr-defined]
