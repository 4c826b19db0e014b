"""Extracted text made fit for a language model: pure functions from string to string.

``clean_text`` runs them in order. Two decisions worth knowing:

* Only ligatures and presentation forms are folded (NFKC on those characters alone). NFKC on everything would
  turn ``10²`` into ``102`` and ``½`` into ``1/2``: wrong numbers are worse than odd glyphs.
* A line break after a hyphen is joined unless the page itself spells the compound with a hyphen elsewhere
  (``well-known``) or the hyphen is a suspended one (``pre- and post-war``).
"""

from __future__ import annotations

import re
import unicodedata

# Latin ligatures, Armenian ligatures, Hebrew and Arabic presentation forms, vertical forms.
_PRESENTATION_FORMS = re.compile("[\ufb00-\ufb06\ufb13-\ufb17\ufb1d-\ufdff\ufe10-\ufe1f\ufe30-\ufe4f\ufe70-\ufefc]+")
# Invisible characters: zero-width space, marks and bidi controls, word joiner, byte-order mark, and the
# "tag" block, whose letters are unseen by a reader but read by a model (hidden instructions).
_INVISIBLE = re.compile("[\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]+")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufdd0-\ufdef\ufffe\uffff]+")
_SURROGATES = re.compile("[\ud800-\udfff]")
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_SPACES = re.compile("[\t \u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]+")
_BLANK_LINES = re.compile(r"\n{3,}")

_HYPHENS = "-\u00ad\u2010"
# [^\W\d_] is "a letter in any script"; the second half must go on in lower case, or it is a name or a range.
# {1,40}: no word is longer, and a bound keeps the search linear on a page that is one endless word.
_BROKEN_WORD = re.compile(rf"(?<![^\W\d_])([^\W\d_]{{1,40}})[{_HYPHENS}](?: ?\n ?| )([^\W\d_]{{1,40}})(?![^\W\d_])")
_COMPOUND = re.compile(r"(?<![^\W\d_])[^\W\d_]{1,40}-[^\W\d_]{1,40}(?![^\W\d_])")
_SUSPENDED = frozenset(
    ("and", "or", "to", "nor", "und", "oder", "bis", "et", "ou", "y", "o", "e", "og", "en", "of", "sowie")
)


def fold_presentation_forms(text: str) -> str:
    """Spell ligatures and presentation forms with ordinary letters: ``ﬁ`` becomes ``fi``, ``10²`` stays."""
    return _PRESENTATION_FORMS.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)


def strip_controls(text: str) -> str:
    """Drop NULs, control and invisible characters; every kind of line end becomes one newline.

    Lone surrogates cannot be encoded as UTF-8, so they become U+FFFD, which ``find_problem`` counts.
    """
    text = _LINE_ENDS.sub("\n", text)
    text = _INVISIBLE.sub("", _CONTROLS.sub("", text))
    return _SURROGATES.sub("\ufffd", text)


def collapse_spaces(text: str) -> str:
    """One space between words, none at line edges, at most one blank line between paragraphs."""
    lines = (_SPACES.sub(" ", line).strip(" ") for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n")


def join_hyphens(text: str) -> str:
    """Mend words cut at a line end: ``adip-`` / ``iscing`` and ``dan- gerous`` become one word each.

    A hard hyphen stays when the text spells the same compound with a hyphen elsewhere.
    """
    compounds = {compound.lower() for compound in _COMPOUND.findall(text)}

    def mend(match: re.Match[str]) -> str:
        first, second = match.group(1), match.group(2)
        if not second[0].islower() or second.lower() in _SUSPENDED:
            return match.group()
        compound = f"{first}-{second}"
        return compound if compound.lower() in compounds else first + second

    # Soft hyphens that mark a mere possibility (inside a line) are invisible: drop them last.
    return _BROKEN_WORD.sub(mend, text).replace("\u00ad", "")


def clean_text(text: str) -> str:
    """All of the above, in the order in which they rely on each other."""
    return join_hyphens(collapse_spaces(strip_controls(fold_presentation_forms(text))))


# --- text that looks like text and is not -------------------------------------------------------------

UNREADABLE_SHARE = 0.3
"""From this share of unreadable characters a page is left out of the prompt."""

PARTLY_UNREADABLE_SHARE = 0.05
"""From this share a page is kept and a warning says so."""

# Glyph names and character ids that extractors print when a font does not say what its glyphs mean.
_GLYPH_NAMES = re.compile(r"/(?:g|G|C|c|cid|glyph|uni|index)[0-9A-Fa-f]{1,5}(?![A-Za-z])|\(cid:\d{1,6}\)")
_SUSPECT_ASCII = re.compile(r"/[gGCcui]|\(cid:|[\x01-\x08\x0e-\x1f\x7f]")
_MARK_RUN = 3
_SCRIPTS_FOR_MOJIBAKE = 5


def unreadable_share(text: str) -> float:
    """Share (0..1) of the visible characters that no reader could make sense of."""
    if text.isascii() and not _SUSPECT_ASCII.search(text):  # nearly every English page: skip the counting
        return 0.0
    visible = sum(1 for char in text if not char.isspace())
    if not visible:
        return 0.0
    glyph_names = sum(len(match.group()) for match in _GLYPH_NAMES.finditer(text))
    rest = _GLYPH_NAMES.sub("", text)
    bad = glyph_names + _unreadable_characters(rest) + _stray_marks(rest)
    return min(1.0, max(bad / visible, _mixed_script_share(rest)))


def find_problem(text: str) -> str | None:
    """Why the text of a page should not be given to a model, or None when it can be."""
    share = unreadable_share(text)
    if share < UNREADABLE_SHARE:
        return None
    return f"text may be unreadable ({share:.0%} of its characters make no sense; the font has no Unicode map)"


def _unreadable_characters(text: str) -> int:
    """Replacement characters, non-characters, private-use and unassigned code points, controls.

    NULs are not counted: some producers write one after every letter, and stripping mends the text.
    """
    return sum(
        1
        for char in text
        if char == "\ufffd" or (char not in "\0\t\n\r\f\v" and unicodedata.category(char) in ("Co", "Cn", "Cc", "Cs"))
    )


def _stray_marks(text: str) -> int:
    """Combining marks in runs of three or more: glyph ids that were taken for code points (U+034B..)."""
    stray = run = 0
    for char in text:
        run = run + 1 if unicodedata.combining(char) or char == "\u034f" else 0
        # At the third mark of a run the two before it turn out to be stray too: 2 -> 0, 3 -> 3, 4 -> 4.
        stray += _MARK_RUN if run == _MARK_RUN else int(run > _MARK_RUN)
    return stray


def _mixed_script_share(text: str) -> float:
    """Share of letters outside ASCII when they come from so many scripts that no language explains it."""
    letters = [char for char in text if char.isalpha()]
    foreign = [char for char in letters if char > "\x7f"]
    if len(foreign) < 2 * _SCRIPTS_FOR_MOJIBAKE:
        return 0.0
    counts: dict[str, int] = {}
    for char in foreign:
        script = unicodedata.name(char, "UNNAMED").split(" ", 1)[0]
        counts[script] = counts.get(script, 0) + 1
    if len(counts) < _SCRIPTS_FOR_MOJIBAKE or max(counts.values()) > 0.6 * len(foreign):
        return 0.0
    return len(foreign) / len(letters)
