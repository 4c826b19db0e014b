"""What a prompt must keep to: one prompt of known ids, no longer than the window, in the memory there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tidekv_llm.errors import ConfigError, ContextOverflowError, MemoryLimitError


def one_prompt(token_ids: Sequence[int] | Tensor) -> Tensor:
    """Ids [S] from ids [S] or [1, S]; a batch would otherwise be read as one long prompt."""
    ids = torch.as_tensor(token_ids)
    if ids.dim() != 1 and (ids.dim() != 2 or ids.shape[0] != 1):
        raise ConfigError(f"token ids must be one prompt [S] or [1, S], not of shape {tuple(ids.shape)}")
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise ConfigError(f"token ids must be whole numbers, not {ids.dtype}")
    return ids.flatten().long()


def check_ids(token_ids: Sequence[int] | Tensor, vocabulary: int) -> Tensor:
    """Ids [1, S] of one prompt.

    Raises:
        ConfigError: there are none, they are no single prompt, or one is outside the vocabulary.
    """
    ids = one_prompt(token_ids)[None]
    if ids.shape[1] == 0:
        raise ConfigError("the prompt has no tokens; give at least one")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ConfigError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary:,}")
    return ids


def check_window(prompt_tokens: int, reserve: int, window: int) -> None:
    """Raise :class:`ContextOverflowError` if prompt and answer do not fit the window."""
    needed = prompt_tokens + reserve
    if needed > window:
        raise ContextOverflowError(
            f"{prompt_tokens:,} prompt tokens + {reserve:,} for the answer exceed the context window of "
            f"{window:,}; shorten the prompt, lower max_new_tokens or raise context_window",
            prompt_tokens=needed,
            limit=window,
        )


def check_exact_length(prompt_tokens: int, exact: int | None) -> None:
    """Raise :class:`ContextOverflowError` if a family's attention is exact for shorter prompts only."""
    if exact is not None and prompt_tokens > exact:
        raise ContextOverflowError(
            f"{prompt_tokens:,} prompt tokens exceed the {exact:,} of this family's chunked attention; "
            "shorten the prompt",
            prompt_tokens=prompt_tokens,
            limit=exact,
        )


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn an allocator's refusal into our error; the tensors of the request are gone by then."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryLimitError(f"out of memory in {what}; lower chunk_size or kept_tokens") from error
    except RuntimeError as error:
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise MemoryLimitError(f"out of memory in {what}; lower chunk_size or kept_tokens") from error
        raise
