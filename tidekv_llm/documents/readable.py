"""Whether the text of a page is text: evidence of a broken extraction, and never a mere variety of scripts."""

from __future__ import annotations

import regex

UNREADABLE_SHARE = 0.3
"""From this share of unreadable characters a page is left out of the prompt."""

PARTLY_UNREADABLE_SHARE = 0.05
"""From this share a page is kept and a warning says so."""

_AFTER_LEAD = r"[\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"  # UTF-8's second bytes, taken for Latin letters and signs
_EVIDENCE = regex.compile(
    "(?V1)"
    # Glyph names and character ids that extractors print when a font does not say what its glyphs mean.
    r"/(?:g|G|C|c|cid|glyph|uni|index)[0-9A-Fa-f]{1,5}(?![A-Za-z])|\(cid:\d{1,6}\)"
    # Replacement characters, private use, unassigned code points, controls. NULs are not counted: some producers
    # write one after every letter, and stripping mends the text.
    r"|[\ufffd\p{Co}\p{Cn}\p{Cs}[\p{Cc}--[\0\t-\r\x85]]]"
    # Combining marks without a letter, or in piles: glyph numbers that were taken for code points (U+034B..).
    r"|(?<![\p{L}\p{M}\p{So}\p{Sm}])[\u0300-\u036f]+|[\u0300-\u036f]{3,}"
    # UTF-8 read as Latin-1: "Ã©" for "é", or two such pairs together.
    rf"|(?:[Â-ß]{_AFTER_LEAD}|[à-ï]{_AFTER_LEAD}{{2}}){{2,}}|â€{_AFTER_LEAD}|Ã[©¨§¤¶¼±¡³®´º¸µ]"
)
# A word whose script changes twice. Han, kana and Hangul are left out: they stand beside anything.
_SCRIPTS = """
    Latin Greek Cyrillic Armenian Hebrew Arabic Syriac Thaana Devanagari Bengali Gurmukhi Gujarati Oriya Tamil Telugu
    Kannada Malayalam Sinhala Georgian Ethiopic Cherokee Canadian_Aboriginal Mongolian
"""
_RUN = "|".join(rf"(?P<{name}>(?:\p{{{name}}}\p{{M}}*+)++)" for name in _SCRIPTS.split())
_SCRIPT_RUN = regex.compile(_RUN)
_CHANGING_WORD = regex.compile(rf"(?<![\p{{L}}\p{{M}}])(?:{_RUN}){{3,}}")
_SUSPECT_ASCII = regex.compile(r"/[gGCcui]|\(cid:|[\x01-\x08\x0e-\x1f\x7f]")


def unreadable_share(text: str) -> float:
    """Share (0..1) of the visible characters that no reader could make sense of."""
    if text.isascii() and not _SUSPECT_ASCII.search(text):  # nearly every English page: skip the counting
        return 0.0
    visible = sum(len(part) for part in text.split())
    bad = sum(len(match[0]) for match in _EVIDENCE.finditer(text))
    mixed = (
        0
        if text.isascii()
        else sum(len(match[0]) for match in _CHANGING_WORD.finditer(text) if _mixes_scripts(match[0]))
    )
    return min(1.0, (bad + mixed) / visible) if visible else 0.0


def find_problem(text: str) -> str | None:
    """Why the text of a page should not be given to a model, or None when it can be."""
    share = unreadable_share(text)
    if share < UNREADABLE_SHARE:
        return None
    return f"text may be unreadable ({share:.0%} of its characters make no sense; the font has no Unicode map)"


def _mixes_scripts(word: str) -> bool:
    """Whether one word has letters of three scripts: ``kΩ`` has two, no word of any language has more."""
    return len({run.lastgroup for run in _SCRIPT_RUN.finditer(word)}) > 2
