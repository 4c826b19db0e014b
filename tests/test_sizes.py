"""Bytes to text and back."""

from __future__ import annotations

import pytest

from tidekv_llm.errors import ConfigError
from tidekv_llm.sizes import format_bytes, parse_bytes

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (75 * MIB, "75.00 MiB"),
        (1_610_612_736, "1.50 GiB"),
        (MIB - 1, "1.00 MiB"),
        (1 << 40, "1.00 TiB"),
        (5 << 50, "5120.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5g", 3 * GIB // 2),
        ("4096", 4096),
        ("9007199254740993", 2**53 + 1),  # a float would lose the last byte
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["a lot", "", "-1", "1e9", "nan", "1.", "9" * 400, "1." + "0" * 5000, "5 apples"])
def test_what_is_no_size_is_refused_with_the_remedy(text):
    with pytest.raises(ConfigError, match="is no size; write 24GiB"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [0, 1023, 1536, 75 * MIB, 24 * GIB, 3 << 40])
def test_what_is_printed_is_understood(size):
    assert parse_bytes(format_bytes(size)) == size
