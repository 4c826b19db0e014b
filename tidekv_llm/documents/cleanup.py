"""Text out of a PDF page made fit for a language model: pure functions from string to string.

Only PDF pages come here; other text is taken as it is. Two decisions worth knowing:

* Only ligatures and presentation forms are folded (NFKC on those characters alone). NFKC on everything would
  turn ``10²`` into ``102`` and ``½`` into ``1/2``: wrong numbers are worse than odd glyphs.
* A hyphen joins at the end of a line only, and not where it is a suspended one (``pre-`` / ``and post-war``) or where
  the document spells the compound with a hyphen elsewhere (``well-known``). Within a line (``dan- gerous``, from a
  scan) it joins only what the document elsewhere spells as one word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import regex

from tidekv_llm.documents.words import normal

# Latin ligatures, Armenian ligatures, Hebrew and Arabic presentation forms, vertical forms.
_PRESENTATION_FORMS = re.compile("[\ufb00-\ufb06\ufb13-\ufb17\ufb1d-\ufdff\ufe10-\ufe1f\ufe30-\ufe4f\ufe70-\ufefc]+")
# Invisible characters: zero-width space, marks and bidi controls, word joiner, byte-order mark.
_INVISIBLE = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")
# The "tag" block, whose letters are unseen by a reader but read by a model; the flags of Wales and Texas need it.
_HIDDEN = re.compile("(\U0001f3f4[\U000e0020-\U000e007e]{2,8}\U000e007f)|[\U000e0000-\U000e007f]+")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufdd0-\ufdef\ufffe\uffff]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_SPACES = re.compile("[\t \u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]+")
_BLANK_LINES = re.compile(r"\n{3,}")

# {2,40}: no half is shorter in any language's rules, none is longer, and a bound keeps the search linear.
_BROKEN_WORD = regex.compile(
    r"(?<![\p{L}\p{M}])(\p{L}[\p{L}\p{M}]{1,39})([-\u00ad\u2010])([\n ])(\p{L}[\p{L}\p{M}]{1,39})(?![\p{L}\p{M}])"
)
_SPELLED = regex.compile(r"(?<![\p{L}\p{M}])(?:\p{L}[\p{L}\p{M}]{1,39}-)?\p{L}[\p{L}\p{M}]{1,79}(?![\p{L}\p{M}])")
_SUSPENDED_TEXT = """
    and or to nor versus vs via through und oder bis bzw beziehungsweise sowie als wie et ou of eller och og lub oraz
    czy nebo či и или до και ή veya
"""
_SUSPENDED = frozenset(_SUSPENDED_TEXT.split())


def strip_hidden(text: str) -> str:
    """Drop letters that no reader sees and every model reads, and lone surrogates, which cannot be encoded."""
    return _SURROGATES.sub("\ufffd", _HIDDEN.sub(lambda match: match[1] or "", text))


def fold_presentation_forms(text: str) -> str:
    """Spell ligatures and presentation forms with ordinary letters: ``ﬁ`` becomes ``fi``, ``10²`` stays."""
    return _PRESENTATION_FORMS.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)


def strip_controls(text: str) -> str:
    """Drop NULs, control and invisible characters; every kind of line end becomes one newline."""
    return strip_hidden(_INVISIBLE.sub("", _CONTROLS.sub("", _LINE_ENDS.sub("\n", text))))


def collapse_spaces(text: str) -> str:
    """One space between words, none at line edges, at most one blank line between paragraphs."""
    lines = (_SPACES.sub(" ", line).strip(" ") for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")


def clean_text(text: str) -> str:
    """All of the above, in the order in which they rely on each other, and letters composed with their marks."""
    return normal(collapse_spaces(strip_controls(fold_presentation_forms(text))))


def join_hyphens(pages: Sequence[str]) -> list[str]:
    """Mend words cut at a line's end: ``adip-`` / ``iscing`` is one word. Pages bear witness for each other."""
    wanted = {
        spelling.casefold()
        for page in pages
        for first, _, _, second in _BROKEN_WORD.findall(page)
        for spelling in (first + second, f"{first}-{second}")
    }
    if not wanted and not any("\u00ad" in page for page in pages):
        return list(pages)
    known = wanted & {spelling.casefold() for page in pages for spelling in _SPELLED.findall(page)}

    def mend(match: regex.Match[str]) -> str:
        return _mended(match[1], match[2], match[3], match[4], known)

    # A soft hyphen inside a line marks a mere possibility and is invisible: drop it last.
    return [_BROKEN_WORD.sub(mend, page).replace("\u00ad", "") for page in pages]


def _mended(first: str, hyphen: str, gap: str, second: str, known: set[str]) -> str:
    joined, compound = first + second, f"{first}-{second}"
    if gap == "\n" and compound.casefold() in known:
        return compound
    if not second[0].isupper() and (hyphen == "\u00ad" or joined.casefold() in known):
        return joined
    broken = gap == "\n" and second[0].islower() and second.casefold() not in _SUSPENDED
    return joined if broken else first + hyphen + gap + second
