"""Texts of the command line as values: types for argparse that say what is wanted when they refuse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence

from tidekv_llm.config import AUTO_CHUNK


def whole_number(text: str) -> int:
    """A whole number; whoever takes it checks its range."""
    return _number(text, "a whole number")


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _number(text, "a whole number of at least 1", least=1)


def chunk_size(text: str) -> int | str:
    """A whole number of at least 1, or ``auto``."""
    return text if text == AUTO_CHUNK else _number(text, f"a whole number of at least 1, or {AUTO_CHUNK}", least=1)


def _number(text: str, wanted: str, least: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} must be {wanted}") from None
    if least is not None and number < least:
        raise ArgumentTypeError(f"{text!r} must be {wanted}")
    return number


def parts(text: str) -> list[str]:
    """What stands between the commas, at least one."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ArgumentTypeError("it is empty; give one or more, separated by commas")
    return found


def counts(text: str) -> list[int]:
    """``512,1024`` as numbers."""
    return [count(part) for part in parts(text)]


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A comma-separated list out of ``allowed``."""

    def parse(text: str) -> list[str]:
        chosen = parts(text)
        for name in chosen:
            if name not in allowed:
                raise ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(allowed)}")
        return chosen

    return parse
