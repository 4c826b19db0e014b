"""Token ids of a prompt's pieces: only the chat template's own text may hold a control token.

Text from documents and users is untrusted: special tokens spelled in it are encoded as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_CONTROL_SPELLING = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")


def template_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of the template's own text, its control tokens among them."""
    if not text:
        return []
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=False, verbose=False)["input_ids"])


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of untrusted text: whatever it spells, no control token comes out."""
    if not text:
        return []
    controls = _control_tokens(tokenizer)
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


def _control_tokens(tokenizer: Any) -> dict[int, str]:
    """Id and spelling of tokens that steer a model: special ones, and added ``<...>`` and ``[...]``."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    controls = {
        int(token_id): str(token)
        for token_id, token in added.items()
        if getattr(token, "special", False) or _CONTROL_SPELLING.fullmatch(str(token))
    }
    names, ids = getattr(tokenizer, "all_special_tokens", ()), getattr(tokenizer, "all_special_ids", ())
    return {**controls, **dict(zip(ids, names, strict=False))}
