"""A random chat model small enough to load in a blink: one character is one token, a special token never comes."""

from __future__ import annotations

import string
from pathlib import Path

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
WINDOW = 2048
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_chat(folder: Path, *, template: bool = True, eos_token_id: int | list[int] = 2) -> Path:
    """A llama of three layers with a character tokenizer, as save_pretrained writes it."""
    import torch
    from transformers import GenerationConfig

    from tests.tiny_models import tiny_model

    tokenizer = tiny_tokenizer(template)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=WINDOW)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0.0  # the best of the others is above zero
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=eos_token_id, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(template: bool = True):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_letters + string.digits + string.punctuation + "ĠĊ"
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *letters))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.chat_template = TEMPLATE if template else None
    return tokenizer
