"""Which pages an answer rests on, from three independent sources, each said by its name.

* ``model``: the model wrote ``[p. 41]`` itself. Verified when the page holds the quoted text, or the words of
  the sentence that carries the marker. A marker for a page that is not in the prompt is dropped: there is no
  page to open.
* ``text``: numbers and rare words of an answer sentence stand together on the page; verified when every
  number of that sentence is there.
* ``attention``: the page's positions scored clearly above the other pages' during selection.

A page found in several ways is one citation with its strongest origin: model (verified), text, attention,
model (unverified: the marker was written, but the page does not bear it out). Nothing here looks at token ids
or tensors; ``evidence`` is any sequence of floats.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Literal

import regex

from tidekv_llm.documents.pages import Document
from tidekv_llm.documents.prompt import PageSpan, Prompt, document_names
from tidekv_llm.documents.words import is_number, letters, sentences, words

Origin = Literal["model", "text", "attention"]
ORIGINS: dict[Origin, str] = {
    "model": "named by the model",
    "text": "words and numbers found on the page",
    "attention": "read most, by attention",
}
"""How a page was found, for readers."""

TEXT_THRESHOLD = 0.5
"""Share of an answer sentence's word weight that must stand on a page."""

VERIFIED_THRESHOLD = 0.65
"""Share of the weight from which a sentence is borne out, its numbers and quotations being there too."""

ATTENTION_RATIO = 1.5
"""A page's mean score must be this many times the median page's."""

MAX_ATTENTION_PAGES = 3
MAX_PAGES_PER_SENTENCE = 2
_MAX_QUOTE = 240
_QUESTION_WEIGHT = 0.5
_NUMBER_WEIGHT = 2.0
_SHORT_ANSWER = 2
_NEARLY = 0.95


@dataclass(frozen=True)
class Citation:
    """One page that supports an answer.

    Args:
        document: index into the documents of the prompt.
        document_name: that document's name, as the prompt and its other citations have it: ``invoice.pdf (2)``.
        page: 1-based physical page.
        label: the page's printed label.
        origin: how the page was found.
        verified: whether the page's words, and every number of the claim, were found together there; always
            False for attention alone.
        quote: the sentence of the page that matches best, or None for attention.
        score: 0..1, comparable within one origin only.
    """

    document: int
    document_name: str
    page: int
    label: str
    origin: Origin
    verified: bool
    quote: str | None
    score: float

    def as_dict(self) -> dict[str, Any]:
        """As JSON types."""
        fields = ("page", "label", "origin", "verified", "quote", "score")
        return {"document": self.document_name, **{name: getattr(self, name) for name in fields}}


def cite_pages(
    answer: str,
    prompt: Prompt | Sequence[PageSpan],
    documents: Document | Sequence[Document],
    evidence: Any | None = None,
    *,
    question: str = "",
) -> tuple[Citation, ...]:
    """Citations for ``answer``, strongest first.

    Args:
        answer: what the model wrote.
        prompt: the prompt, or its spans: only pages in it can be cited.
        documents: the documents given to ``build_prompt``, in the same order.
        evidence: one non-negative score per prompt token (a list, an array or a tensor), or None.
        question: helps to place a short answer ("14."); taken from the prompt when it is one.
    """
    chosen = (documents,) if isinstance(documents, Document) else tuple(documents)
    spans = prompt.spans if isinstance(prompt, Prompt) else tuple(prompt)
    asked = prompt.question if isinstance(prompt, Prompt) and not question else question
    index = _PageIndex(spans, chosen)
    found = [
        *_model_citations(answer, index),
        *_text_citations(_without_markers(answer), asked, index),
        *_attention_citations(evidence, index),
    ]
    best: dict[tuple[int, int], Citation] = {}
    for citation in found:
        key = (citation.document, citation.page)
        if key not in best or _strength(citation) > _strength(best[key]):
            best[key] = citation
    return tuple(sorted(best.values(), key=_strength, reverse=True))


def _strength(citation: Citation) -> tuple[int, float]:
    rank = {"model": 3 if citation.verified else 0, "text": 2, "attention": 1}[citation.origin]
    return rank, citation.score


# --- words ---------------------------------------------------------------------------------------------

# A paragraph is easier to read and to extend than a list of two hundred quoted words.
_STOP_WORD_TEXT = """
    a about after all also am an and any are as at be because been before being but by can could did do
    does during each for from had has have he her his how i if in into is it its itself just may me more
    most must my no nor not of off on once only or other our out over own per said same say says shall
    she should so some such than that the their them then there these they this those through to too
    under until up upon us very was we were what when where which while who whom why will with would yes
    you your according answer based cannot context document documents give given information know
    mention mentioned page pages passage provide provided question sorry text
"""
_STOP_WORDS = frozenset(_STOP_WORD_TEXT.split())
_LAST_LATIN = "\u024f"


def _terms(text: str) -> list[str]:
    """Content words and numbers, folded so that forms of one word meet: ``Keepers`` -> ``keeper``."""
    return [_stem(word) for word in words(text) if _tells(word)]


def _tells(word: str) -> bool:
    """Whether a word means something by itself; a single letter does in scripts whose letters are words."""
    return is_number(word) or (word not in _STOP_WORDS and (len(word) > 1 or word > _LAST_LATIN))


def _stem(word: str) -> str:
    """A plural or past form without its ending; crude, but the same on both sides of the comparison."""
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


# --- pages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _PageText:
    """A page in the prompt, with its words counted once, when they are first needed."""

    span: PageSpan
    name: str
    text: str

    @cached_property
    def terms(self) -> frozenset[str]:
        return frozenset(_terms(self.text))

    @cached_property
    def sentences(self) -> list[tuple[str, frozenset[str]]]:
        return [(sentence, frozenset(_terms(sentence))) for sentence in sentences(self.text)]

    @cached_property
    def folded(self) -> str:
        return letters(self.text)[0]

    def cite(self, origin: Origin, verified: bool, quote: str | None, score: float) -> Citation:
        span = self.span
        return Citation(
            span.document,
            self.name,
            span.page,
            span.label,
            origin,
            verified,
            quote,
            round(min(1.0, score), 4),
        )


class _PageIndex:
    """The pages in the prompt and how rare each word is among them."""

    def __init__(self, spans: Sequence[PageSpan], documents: Sequence[Document]) -> None:
        texts = {(at, page.number): page.text for at, document in enumerate(documents) for page in document.pages}
        self.documents, names = documents, document_names(documents)
        self.pages = [
            _PageText(span, names[span.document], texts.get((span.document, span.page), ""))
            for span in spans
            if span.document < len(documents)
        ]

    @cached_property
    def page_counts(self) -> Counter[str]:
        return Counter(term for page in self.pages for term in page.terms)

    def weights(self, text: str) -> dict[str, float]:
        """Weight per distinct term: rare words weigh more, numbers twice as much again."""
        count = len(self.pages)
        return {
            term: math.log1p(count / max(1, self.page_counts[term])) * (_NUMBER_WEIGHT if is_number(term) else 1)
            for term in _terms(text)
        }

    def find(self, label: str, name: str | None) -> list[_PageText]:
        """Pages with this label; the file name narrows the choice when the model wrote one."""
        matches = [page for page in self.pages if page.span.label.casefold() == label.casefold()]
        if name is None or len(self.documents) == 1:
            return matches
        wanted = name.casefold()
        return [page for page in matches if wanted == page.name.casefold()]


def _coverage(weights: dict[str, float], terms: frozenset[str]) -> float:
    """Share (0..1) of the weight that these terms cover."""
    total = sum(weights.values())
    return sum(weight for term, weight in weights.items() if term in terms) / total if total else 0.0


def _best_sentence(weights: dict[str, float], page: _PageText) -> tuple[str | None, float]:
    """The sentence of the page with the highest coverage, cut to a snippet, and that coverage."""
    at, coverage = _best_position(weights, page)
    return (None, 0.0) if at is None else (_snippet(page.sentences[at][0], weights), coverage)


def _best_position(weights: dict[str, float], page: _PageText) -> tuple[int | None, float]:
    best, best_coverage = None, 0.0
    for at, (_, terms) in enumerate(page.sentences):
        coverage = _coverage(weights, terms)
        if coverage > best_coverage:
            best, best_coverage = at, coverage
    return best, best_coverage


def _numbers_hold(claim: dict[str, float], page: _PageText, asked: dict[str, float] | None = None) -> bool:
    """Whether every number of the claim stands where the page says what the claim says, its numbers aside.

    "The tank holds 36 litres" shares its words with "The tank holds 7,400 litres. The tower is 36 metres high.": the
    page is right and the answer is not, so the page is cited and not verified. ``asked`` are the words of the question
    when the claim is little more than a number.
    """
    numbers = {term for term in claim if is_number(term)}
    said = {term: weight for term, weight in {**(asked or {}), **claim}.items() if term not in numbers}
    if not numbers:
        return True
    coverages = [_coverage(said, terms) for _, terms in page.sentences]
    best = max(coverages, default=0.0)
    places = (at for at, coverage in enumerate(coverages) if coverage == best)
    return any(numbers <= _said_at(at, said.keys(), numbers, page) for at in places)


def _said_at(at: int, said: Set[str], numbers: Set[str], page: _PageText) -> frozenset[str]:
    """The terms of a sentence, and of a neighbour that says more of the claim (``Renn leads. He came in 2016``).

    A sentence with another number of its own has said enough.
    """
    here = page.sentences[at][1]
    if any(is_number(term) for term in here - numbers):
        return here
    near = [page.sentences[by][1] for by in (at - 1, at + 1) if 0 <= by < len(page.sentences)]
    return here.union(*(terms for terms in near if said & terms - here))


def _snippet(sentence: str | None, weights: dict[str, float]) -> str | None:
    """At most ``_MAX_QUOTE`` characters around the first matching word; tables have no full stops."""
    if sentence is None or len(sentence) <= _MAX_QUOTE:
        return sentence
    hits = (match.start() for match in re.finditer(r"\S+", sentence) if not weights.keys().isdisjoint(_terms(match[0])))
    start = max(0, min(next(hits, 0) - 40, len(sentence) - _MAX_QUOTE))
    if start:
        start = sentence.find(" ", start) + 1 or start
    return sentence[start : start + _MAX_QUOTE].rsplit(" ", 1)[0]


# --- markers the model wrote -----------------------------------------------------------------------------

_MARKER = re.compile(
    r"[\[(](?P<name>[^\[\]\n]{0,100}?)\s?\b(?:pages?|pp?\.)\s?(?P<labels>[^\[\]()\n]{1,60})[\])]",
    re.IGNORECASE,
)
_QUOTED = regex.compile(r"(?|[\"“„«]([^\"”“»\n]{8,400})[\"”“»]|[「『《]([^「」『』《》\n]{4,400})[」』》])")
_MAX_RANGE = 20


def _without_markers(answer: str) -> str:
    """The page numbers of markers are no evidence for anything."""
    return _MARKER.sub(" ", answer)


def _model_citations(answer: str, index: _PageIndex) -> Iterator[Citation]:
    previous_end = 0
    for match in _MARKER.finditer(answer):
        # The claim is what stands between the marker before and this one, back to a sentence's start.
        claim = (sentences(answer[previous_end : match.start()]) or [""])[-1]
        if not claim and previous_end:  # "[p. 3] [p. 4]": both stand for the same claim
            claim = (sentences(_without_markers(answer[: match.start()])) or [""])[-1]
        previous_end = match.end()
        name = match["name"].strip(" ,;:") or None
        for label in _labels(match["labels"], index):
            for page in index.find(label, name):
                yield _model_citation(claim, page, index)


def _labels(written: str, index: _PageIndex) -> Iterator[str]:
    """``41, 43-45`` as single labels; a label such as ``A-3`` stays whole."""
    for part in re.split(r"\s*(?:[,;&]|\band\b|\bpp?\.)\s*", written.strip()):
        numbers = re.fullmatch(r"(\d{1,6})\s*[-–]\s*(\d{1,6})", part)
        if numbers and not index.find(part, None):
            first, last = int(numbers[1]), int(numbers[2])
            yield from (str(number) for number in range(first, min(last, first + _MAX_RANGE) + 1))
        elif part:
            yield part


def _quotes(text: str) -> list[str]:
    return [match[1] for match in _QUOTED.finditer(text)]


def _quotes_hold(claim: str, page: _PageText) -> bool:
    return all(letters(quote)[0] in page.folded for quote in _quotes(claim))


def _model_citation(claim: str, page: _PageText, index: _PageIndex) -> Citation:
    quotes = _quotes(claim)
    weights = index.weights(claim)
    sentence, coverage = _best_sentence(weights, page)
    if quotes:
        # A quotation is checked to the letter: a wrong one is worse than none.
        held = [quote for quote in quotes if letters(quote)[0] in page.folded]
        verified = len(held) == len(quotes)
        return page.cite("model", verified, held[0] if held else None, 1.0 if verified else coverage)
    score = (coverage + _coverage(weights, page.terms)) / 2
    verified = score >= VERIFIED_THRESHOLD and _numbers_hold(weights, page)
    return page.cite("model", verified, sentence if verified else None, score)


# --- words of the answer ---------------------------------------------------------------------------------


def _text_citations(answer: str, question: str, index: _PageIndex) -> Iterator[Citation]:
    """Each sentence of the answer points at the page, or the two pages, where its words stand together."""
    if not index.pages:
        return
    asked = index.weights(question)
    for sentence in sentences(answer):
        weights = index.weights(sentence)
        if not weights or not _telling(weights, index):
            continue
        scored = [(_match(weights, asked, page), page) for page in index.pages if weights.keys() & page.terms]
        yield from _top_pages(sentence, scored, weights, asked)


def _telling(weights: dict[str, float], index: _PageIndex) -> bool:
    """Whether the sentence has a number or a word that some, but not most, pages have.

    A word that is on every page places nothing, unless there is one page only.
    """
    count = len(index.pages)
    return any(0 < index.page_counts[term] <= max(1, 0.6 * count) or is_number(term) for term in weights)


def _match(weights: dict[str, float], asked: dict[str, float], page: _PageText) -> tuple[float, float]:
    """(support, rank): support decides whether to cite; rank, which also sees the question, decides whom.

    An answer of one or two words ("12.") places little, so there the question must be supported as well.
    """
    both = {**{term: _QUESTION_WEIGHT * weight for term, weight in asked.items()}, **weights}
    _, together_with_question = _best_sentence(both, page)
    rank = (together_with_question + _coverage(both, page.terms)) / 2
    claim = {**asked, **weights} if len(weights) <= _SHORT_ANSWER else weights
    support = (_coverage(claim, page.terms) + _best_sentence(claim, page)[1]) / 2
    return support, (2 * rank + support) / 3


def _top_pages(
    sentence: str,
    scored: Sequence[tuple[tuple[float, float], _PageText]],
    weights: dict[str, float],
    asked: dict[str, float],
) -> Iterator[Citation]:
    supported = [(support, rank, page) for (support, rank), page in scored if support >= TEXT_THRESHOLD]
    supported.sort(key=lambda entry: (-entry[1], entry[2].span.start))
    both = {**{term: _QUESTION_WEIGHT * weight for term, weight in asked.items()}, **weights}
    for support, rank, page in supported[:MAX_PAGES_PER_SENTENCE]:
        if rank >= _NEARLY * supported[0][1]:
            verified = (
                support >= VERIFIED_THRESHOLD
                and _numbers_hold(weights, page, asked if len(weights) <= _SHORT_ANSWER else None)
                and _quotes_hold(sentence, page)
            )
            yield page.cite("text", verified, _best_sentence(both, page)[0], support)


# --- attention -------------------------------------------------------------------------------------------


def _attention_citations(evidence: Any | None, index: _PageIndex) -> Iterator[Citation]:
    """Pages whose mean score is clearly above the median page's."""
    if evidence is None or len(index.pages) < 2:
        return
    values = _floats(evidence)
    means = [(_mean(values[page.span.start : page.span.stop]), page) for page in index.pages]
    middle = median(mean for mean, _ in means)
    total = sum(mean for mean, _ in means)
    clear = [(mean, page) for mean, page in means if mean > 0 and mean >= ATTENTION_RATIO * middle]
    clear.sort(key=lambda entry: -entry[0])
    for mean, page in clear[:MAX_ATTENTION_PAGES]:
        yield page.cite("attention", False, None, mean / total)


def _floats(evidence: Any) -> list[float]:
    """A list of floats from a list, an array or a tensor on any device; NaN and negatives count as zero."""
    plain: Iterable[Any] = evidence.tolist() if hasattr(evidence, "tolist") else evidence
    return [value if math.isfinite(value) and value > 0 else 0.0 for value in map(float, plain)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
