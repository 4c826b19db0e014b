"""What must be copied: identifiers that stand in one line of many, asked for by name.

A question attends to an identifier's key and to its first tokens; the rest of the line stands behind. Every prompt is
one fresh process that prefills once; each setting then keeps its own part of the same full layers (``FanOut``).
"""

from __future__ import annotations

import argparse
import itertools
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import count, counts, names
from tidekv_llm.bench.harness import Harness, Job, Report, Row, add_common_arguments
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ConfigError
from tidekv_llm.models.shapes import RANDOM_PREFIX

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV

EVERYTHING = "everything kept"
SETTINGS: dict[str, dict[str, Any]] = {
    "snapkv, passage": {"pooling": "passage"},
    "snapkv, max 21": {"pooling": "max"},
    "snapkv, max 81": {"pooling": "max", "kernel_size": 81},
    "chunkkv": {"selector": "chunkkv"},
}
_WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbour",
    "island",
    "juniper",
    "kestrel",
    "lantern",
    "meadow",
    "north",
    "orchard",
    "pebble",
    "quarry",
    "river",
    "summit",
    "timber",
    "upland",
    "valley",
    "willow",
    "yarrow",
]


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _iban(draw: random.Random) -> str:
    return " ".join(["DE" + f"{draw.randrange(100):02}", *(f"{draw.randrange(10_000):04}" for _ in range(4)), "00"])


def _address(draw: random.Random) -> str:
    return (
        f"https://{draw.choice(_WORDS)}.example/{draw.choice(_WORDS)}/{draw.randrange(10**6)}?page={draw.randrange(99)}"
    )


def _sum(draw: random.Random) -> str:
    return f"{draw.randrange(1, 999)},{draw.randrange(1000):03},{draw.randrange(1000):03}.{draw.randrange(100):02} kWh"


def _name(draw: random.Random) -> str:
    return " ".join(draw.choice(_WORDS).capitalize() for _ in range(5))


# kind -> a line about a key and its value, the question about a key, and what makes a value
KINDS: dict[str, tuple[str, str, Callable[[random.Random], str]]] = {
    "uuid": ("The locker of badge {0} opens with {1}.", "What does the locker of badge {0} open with?", _uuid),
    "iban": ("The account of customer {0} is {1}.", "What is the account of customer {0}?", _iban),
    "url": ("The manual of pump {0} is at {1}.", "Where is the manual of pump {0}?", _address),
    "sum": ("Station {0} used {1} last year.", "How much did station {0} use last year?", _sum),
    "name": ("The ship with number {0} is called {1}.", "What is the ship with number {0} called?", _name),
}


@dataclass(frozen=True, slots=True)
class Quote:
    """What one setting answered.

    Attributes:
        setting: a name of :data:`SETTINGS`, or :data:`EVERYTHING`.
        kept_tokens: K; 0 where everything was kept.
        kind: a name of :data:`KINDS`.
        value: what stands in the document.
        answer: the beginning of the answer.
    """

    setting: str
    kept_tokens: int
    kind: str
    value: str
    answer: str

    @property
    def right(self) -> bool:
        """Whether the whole value is in the answer, letter by letter."""
        return self.value in self.answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tidekv bench quotes``."""
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id or folder (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=count, default=4000, help="default: %(default)s")
    parser.add_argument("--kept-tokens", type=counts, default=[512, 1024], help="budgets (default: 512,1024)")
    parser.add_argument("--kinds", type=names(tuple(KINDS)), default=list(KINDS), help="default: all")
    parser.add_argument("--limit", type=count, default=20, help="questions of each kind (default: %(default)s)")
    add_common_arguments(parser, rounds=None)


def run(harness: Harness) -> Report:
    """Ask and report: a table, JSON with every answer, CSV."""
    options = harness.options
    if options.model.startswith(RANDOM_PREFIX):
        raise ConfigError(f"--model={options.model} has no tokenizer; this benchmark needs a model that can read")
    jobs = [_job(options, *place) for place in itertools.product(options.kinds, range(options.limit))]
    runs = harness.run(jobs)
    quotes = [Quote(**found) for job in jobs for found in runs[job.label][0]["quotes"]]
    title = f"Identifiers quoted whole, {options.model}, {options.prompt_tokens:,} tokens"
    return harness.finish(tabulate(quotes), runs=runs, title=title)


def _job(options: argparse.Namespace, kind: str, index: int) -> Job:
    arguments = {
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "kept_tokens": options.kept_tokens,
        "kind": kind,
        "index": index,
        "limit": options.limit,
    }
    return Job(f"{kind} {index + 1}", "quotes:find", arguments)


def find(
    *, model: str, prompt_tokens: int, kept_tokens: Sequence[int], kind: str, index: int, limit: int
) -> dict[str, Any]:
    """The child's work: one question, every setting with every budget."""
    from tidekv_llm.bench.needle import answers
    from tidekv_llm.engine import TideKV

    with TideKV.from_pretrained(model) as llm:
        ids, value = make_prompt(llm, prompt_tokens, kind, index, limit)
        room = len(llm.encode(value)) + 16
        if len(ids) + room > llm.context_window:
            raise ConfigError(
                f"--prompt-tokens={prompt_tokens} and an answer of {room} exceed the model's "
                f"{llm.context_window:,} tokens; give fewer"
            )
        cases = [(EVERYTHING, 0), *((name, kept) for kept in kept_tokens for name in SETTINGS)]
        configs = [PrefillConfig(kept_tokens=kept or len(ids), **SETTINGS.get(name, {})) for name, kept in cases]
        texts = answers(llm, ids, configs, new_tokens=room)
    return {
        "quotes": [
            asdict(Quote(name, kept, kind, value, text)) for (name, kept), text in zip(cases, texts, strict=True)
        ]
    }


def make_prompt(llm: TideKV, prompt_tokens: int, kind: str, index: int, limit: int) -> tuple[list[int], str]:
    """Ids of a chat prompt with a line for each of many keys, and the value that is asked for.

    The lines fill ``prompt_tokens``, less than one line below; question ``index`` of ``limit`` asks for the line at
    that part of the way.
    """
    line, question, make = KINDS[kind]
    draw = random.Random(f"{kind} {index}")
    key: Callable[[], str] = (lambda: _uuid(draw)) if kind == "uuid" else (lambda: str(draw.randrange(10_000, 99_999)))
    pairs: list[tuple[str, str]] = []
    texts: list[str] = []
    room = prompt_tokens - len(_prompt(llm, [], question.format(key())))
    while room > 0:
        pair = (key(), make(draw))
        text = line.format(*pair)
        room -= len(llm.encode(f"{text}\n"))
        pairs.append(pair)
        texts.append(text)
    if len(pairs) < 2:
        raise ConfigError(f"--prompt-tokens={prompt_tokens} is too few for a line and its question; give more")
    wanted, value = pairs[int((index + 0.5) / limit * (len(pairs) - 1))]
    return _prompt(llm, texts[:-1], question.format(wanted)), value


def _prompt(llm: TideKV, lines: Sequence[str], question: str) -> list[int]:
    return llm.encode([{"role": "user", "content": "\n".join([*lines, "", question])}])


def tabulate(quotes: Sequence[Quote]) -> list[Row]:
    """A row per setting and budget: how many it quoted, in all and of each kind."""
    groups: dict[tuple[str, int], list[Quote]] = {}
    for quote in quotes:
        groups.setdefault((quote.setting, quote.kept_tokens), []).append(quote)
    return [
        {
            "setting": name,
            "kept_tokens": kept or None,
            "questions": len(own),
            "right": sum(quote.right for quote in own),
            **{
                kind: sum(quote.right for quote in own if quote.kind == kind)
                for kind in dict.fromkeys(quote.kind for quote in own)
            },
        }
        for (name, kept), own in groups.items()
    ]
