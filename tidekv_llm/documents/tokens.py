"""Token ids of a prompt's pieces: only the chat template's own text may hold a control token.

Text from documents and users is untrusted: special tokens spelled in it are encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tidekv_llm.errors import ConfigError

_CONTROL_SPELLING = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


def template_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of the template's own text, its control tokens among them."""
    if not text:
        return []
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)["input_ids"])


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of untrusted text: whatever it spells, no control token comes out.

    Raises:
        ConfigError: the text holds half of a character.
    """
    if not text:
        return []
    check_characters(text)
    controls = control_tokens(tokenizer)
    spelled = [token for token in controls.values() if token and token in text]
    ids = _encode_plain(tokenizer, text)
    # Not every tokenizer heeds split_special_tokens, and some mark control tokens as ordinary added ones:
    # then the spelling is cut in two, and the halves are encoded apart.
    if spelled and not controls.keys().isdisjoint(ids):
        pattern = re.compile("|".join(f"(?<={re.escape(t[:1])})(?={re.escape(t[1:])})" for t in spelled))
        ids = [part_id for part in pattern.split(text) if part for part_id in _encode_plain(tokenizer, part)]
    return ids


def _encode_plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])


def check_characters(text: str) -> None:
    """Refuse text with a lone surrogate, half of a character that no encoding has.

    Raises:
        ConfigError: with its place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"character {error.start} of the text is {text[error.start]!r}, half of a character (a lone surrogate); "
            "decode the text again from its source"
        ) from error


def control_ids(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The control tokens among ids, in order."""
    controls = control_tokens(tokenizer)
    return [token for token in ids if token in controls]


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """Id and spelling of tokens that steer a model: special ones, and added ``<...>`` and ``[...]``."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    controls = {
        int(token_id): str(token)
        for token_id, token in added.items()
        if getattr(token, "special", False) or _CONTROL_SPELLING.fullmatch(str(token))
    }
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return {**controls, **dict(zip(ids, names, strict=False))}
