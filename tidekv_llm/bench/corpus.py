"""Real English text that every machine has: the language reference inside Python's standard library."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@cache
def corpus_text() -> str:
    """About 700 kB of technical prose, the same for the same Python version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def corpus_prompt(tokenizer: PreTrainedTokenizerBase, length: int, index: int = 0) -> list[int]:
    """Exactly ``length`` token ids of real text; prompts with different ``index`` do not overlap while text lasts.

    Raises:
        ValueError: the corpus has fewer tokens than one prompt needs.
    """
    text = corpus_text()
    width = length * 6  # characters: more than any tokenizer's average per token
    start = (index * width) % max(1, len(text) - width)
    ids: list[int] = tokenizer(text[start : start + width], add_special_tokens=True).input_ids
    if len(ids) < length:
        ids = tokenizer(text, add_special_tokens=True).input_ids
    if len(ids) < length:
        raise ValueError(f"the corpus has {len(ids):,} tokens, fewer than the {length:,} asked for")
    return ids[:length]
