"""Bytes to text and text to bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from tidekv_llm.errors import ConfigError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def format_bytes(nbytes: int) -> str:
    """A size for people: ``format_bytes(1_610_612_736) == "1.50 GiB"``."""
    size, sign = float(abs(nbytes)), "-" if nbytes < 0 else ""
    for unit in _BINARY[:-1]:
        # 1023.999 would print as "1024.00": move on to the next unit a little earlier.
        if size < 1023.995:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} {_BINARY[-1]}"


def parse_bytes(text: str, *, least: int = 0) -> int:
    """``24GiB``, ``24GB``, ``512MiB``, ``80g`` or plain bytes as a number of bytes.

    Raises:
        ConfigError: it is no size, or below ``least``: most likely its unit was forgotten.
    """
    match = re.fullmatch(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is no size; write 24GiB, 512MiB or a number of bytes")
    size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if size < least:
        raise ConfigError(f"{text!r} is {size:,} bytes, too little for a device; write a unit, such as 24GiB")
    return size
