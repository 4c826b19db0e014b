"""Words and sentences of any script: the one place where ranking, citations and the app cut text up and compare it.

``normal`` is what a prompt is made of (NFC). ``fold`` is for comparing only: upper case, width, ligatures, optional
vowel points and the digits of a script do not count there. It leaves ``10²`` and ``½`` alone, for ``102`` and ``1/2``
would be other numbers.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import regex

# Scripts that write no spaces between words, and Hangul, whose particles cling to their words: there, pairs of
# characters stand in for words. Script_Extensions, because the long-vowel mark belongs to two scripts.
_SPACELESS = (
    r"\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Bopomofo}\p{scx=Yi}\p{scx=Thai}\p{scx=Lao}\p{scx=Khmer}"
    r"\p{scx=Myanmar}\p{scx=Tai_Le}\p{scx=New_Tai_Lue}\p{scx=Tai_Tham}\p{scx=Tai_Viet}\p{scx=Javanese}\p{scx=Balinese}"
)
_LETTER, _MARKED = r"[\p{L}\p{Nl}]", r"[\p{L}\p{Nl}\p{M}]"
_PAIRED = rf"[{_SPACELESS}\p{{Hangul}}]"
_WORD = regex.compile(
    r"(?V1)(?P<number>\p{Nd}+(?:[.,:٫]\p{Nd}+)*|\p{No})"
    rf"|(?P<run>[{_LETTER}&&{_PAIRED}][{_MARKED}&&[{_PAIRED}\p{{M}}]]*)"
    rf"|(?P<word>[{_LETTER}--{_PAIRED}][{_MARKED}--[{_PAIRED}&&\p{{L}}]]*)"
)
_ASCII_WORD = re.compile(r"\d+(?:[.,:]\d+)*|[a-z]+")
_CLUSTER = regex.compile(r"\X")
_HAN_NUMBER = regex.compile("[〇零一二三四五六七八九十百千万萬億亿兆两兩]{2,}")
_THOUSANDS = regex.compile(r"(?<=\p{Nd})[,，٬'’\u00a0\u2009\u202f](?=\p{Nd}{3}(?!\p{Nd}))")
# A line that ends inside a word of a spaceless script; no other script loses anything when a break becomes a space.
_SPACELESS_BREAK = regex.compile(rf"(?V1)(?<=[{_SPACELESS}]) *\n *(?=[{_SPACELESS}])")


# --- one form ------------------------------------------------------------------------------------------------

_COMPATIBLE = regex.compile(r"\P{No}+")
_INDEX = regex.compile(r"(?<=\p{L}\p{M}*)\p{No}")  # m² is m2, but 10² is not 102
# Vowel points, cantillation, accents and stress that writers leave out at will; a mark of an Indic or a Latin
# letter makes another letter and stays.
_OPTIONAL_MARKS = regex.compile(
    r"(?V1)(?|([[\p{Arabic}\p{Hebrew}\p{Greek}]&&\p{L}])\p{Mn}++|([\p{Cyrillic}--[гек]])[\u0300\u0301]++"
    r"|(е)[\u0300\u0301\u0308]++|(i)\u0307++)"
)
_PILE = regex.compile(r"(\p{M}{30,}+)")  # no writing has as many on one letter
_UNSEEN = regex.compile(r"[\p{Cf}\p{Variation_Selector}ـ]+")
_VARIANTS = str.maketrans({"ı": "i", "ς": "σ", "ى": "ي", "ی": "ي", "ک": "ك", "٫": "."})
_OTHER_DIGITS = regex.compile(r"(?V1)[\p{Nd}--[0-9]]")


def normal(text: str) -> str:
    """Letters with their marks composed (NFC): ``e`` and a combining acute become ``é``."""
    return text if text.isascii() else _normalized("NFC", text)


def fold(text: str) -> str:
    """The text as it is compared: ``Ｇérant``, ``gérant`` and ``GÉRANT`` are one; so are ``７٤`` and ``74``."""
    if text.isascii():
        return text.lower()
    for part in (_COMPATIBLE, _INDEX):
        text = part.sub(lambda match: _normalized("NFKD", match[0]), _UNSEEN.sub("", text))
    text = _normalized("NFD", text.casefold()).translate(_VARIANTS)
    text = _OPTIONAL_MARKS.sub(r"\1", text)
    text = _OTHER_DIGITS.sub(lambda match: str(unicodedata.decimal(match[0])), text)
    return _normalized("NFC", text)


def _normalized(form: Literal["NFC", "NFD", "NFKD"], text: str) -> str:
    """``unicodedata.normalize``, which takes a pile of marks by the square of its height: piles stay as they are."""
    parts = _PILE.split(text)
    parts[::2] = [unicodedata.normalize(form, part) for part in parts[::2]]
    return "".join(parts)


def letters(text: str) -> tuple[str, list[int]]:
    """Letters and digits only, folded, and for each the place of the character it came from.

    Spaces, line breaks, hyphens and quotation marks do not matter then when a quotation is looked up.
    """
    kept: list[str] = []
    places: list[int] = []
    for cluster in _CLUSTER.finditer(text):
        for char in fold(cluster[0]):
            if char.isalnum() or unicodedata.category(char)[0] == "M":
                kept.append(char)
                places.append(cluster.start())
    return "".join(kept), places


# --- words -----------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Folded words and numbers in reading order: ``"The 7,400 litres"`` gives the, 7400, litres.

    A script without spaces gives pairs of characters: ``"灯台の高さ"`` gives 灯台, 台の, の高, 高さ.
    """
    text = _THOUSANDS.sub("", text)
    if text.isascii():  # most pages: the same words, several times faster
        return _ASCII_WORD.findall(text.lower())
    text = _SPACELESS_BREAK.sub("", text)
    return [word for match in _WORD.finditer(fold(text)) for word in _words_of(match)]


def _words_of(match: regex.Match[str]) -> list[str]:
    if match.lastgroup != "run":
        return [match[0]]
    clusters = _CLUSTER.findall(match[0])
    pairs = [first + second for first, second in pairwise(clusters)] or [match[0]]
    return pairs + [number for number in _HAN_NUMBER.findall(match[0]) if len(number) > 2]


def is_number(word: str) -> bool:
    """Whether a word of ``words`` is a number, in figures or in two Chinese numerals or more."""
    return unicodedata.category(word[0]) in ("Nd", "No") or _HAN_NUMBER.fullmatch(word) is not None


# --- sentences -------------------------------------------------------------------------------------------------

_CLOSING = r"[\p{Pe}\p{Pf}\"'’”]*+"
# Up to two letters before a full stop are an abbreviation or initial ("No. 4", "St. Mary"), and no sentence begins
# with a small letter (Georgian has no others). Runs of marks are taken whole and never given back: the search
# stays linear.
_SENTENCE_END = regex.compile(
    rf"(?V1)(?:[\p{{SB=STerm}}--[!?]]|．(?!\p{{Nd}})|(?<=[{_SPACELESS}])[.!?])[\p{{SB=STerm}}.]*+{_CLOSING}\s*+"
    rf"|(?<![.!?]|\b\p{{Lu}}\p{{Ll}}?(?=\.))[.!?]++{_CLOSING}\s++(?![\p{{Ll}}--\p{{Georgian}}])"
    r"|(?<!\n)\n\s*\n\s*"
)
_WINDOW = 24
"""Words that stand in for a sentence where a text goes on for twice as many without an end."""


def sentences(text: str) -> list[str]:
    """Sentences on one line each; rows of a table one by one; windows of words where nothing ends a sentence."""
    parts = (row for part in _cut(text) for row in _rows(part))
    lines = (regex.sub(r"\s+", " ", _SPACELESS_BREAK.sub("", part)).strip() for part in parts)
    return [window for line in lines if line for window in _windows(line)]


def _cut(text: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE_END.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def _rows(part: str) -> list[str]:
    """The lines apart when each of them has a number, as in a table; prose wraps where it likes and stays together."""
    lines = [line for line in part.split("\n") if line.strip()]
    return lines if all(regex.search(r"\p{Nd}", line) for line in lines) else [part]


def _windows(line: str) -> Iterator[str]:
    if len(line) <= 2 * _WINDOW:
        yield line
        return
    places = [place for match in _WORD.finditer(line) for place in _places_of(match)]
    last = len(places) - _WINDOW
    if last <= _WINDOW:
        yield line
        return
    for at in range(0, last + _WINDOW // 2, _WINDOW // 2):
        stop = at + _WINDOW
        yield line[places[at] : places[stop] if stop < len(places) else len(line)].strip()


def _places_of(match: regex.Match[str]) -> list[int]:
    """Where words start: each word, and every second character of a spaceless run."""
    if match.lastgroup != "run":
        return [match.start()]
    return [match.start() + cluster.start() for cluster in list(_CLUSTER.finditer(match[0]))[::2]]
