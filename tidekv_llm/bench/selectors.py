"""Which selector settings find a needle: the table behind the defaults.

Every prompt is one fresh process that prefills once; each setting then keeps its own part of the same full layers
(``FanOut``). Several numbers and haystacks are worth their time: where a number's digits fall is chance.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import count, counts, names, parts
from tidekv_llm.bench.harness import Harness, Job, Report, Row, add_common_arguments
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ConfigError
from tidekv_llm.models.shapes import RANDOM_PREFIX

if TYPE_CHECKING:
    from tidekv_llm.engine import TideKV

Setting = dict[str, Any]
# (window, pooling, kernel, weights): settings that SnapKV and its followers published, and their neighbours.
SNAPKV_GRID = (
    (32, "max", 7, "uniform"),
    (32, "avg", 7, "uniform"),
    (32, "avg", 5, "uniform"),
    (64, "avg", 5, "uniform"),
    (32, "none", 1, "uniform"),
    (16, "max", 7, "uniform"),
    (8, "max", 7, "uniform"),
    (16, "avg", 21, "uniform"),
    (8, "max", 21, "uniform"),
    (32, "max", 21, "uniform"),
    (32, "avg", 21, "uniform"),
    (32, "max", 41, "uniform"),
    (16, "passage", 1, "uniform"),
    (32, "passage", 1, "uniform"),
    (32, "max", 7, "recency"),
    (16, "max", 21, "recency"),
    (64, "max", 21, "recency"),
)
OTHERS: tuple[Setting, ...] = (
    {"head_budget": "ada"},
    {"layer_budget": "pyramid"},
    {"layer_budget": "cake"},
    {"layer_budget": "pyramid", "head_budget": "ada"},
    {"kv_bits": 8},
    {"kv_bits": 4},
    {"kv_bits": 2},
    {"selector": "chunkkv"},
    {"selector": "chunkkv", "window_size": 32},
    {"selector": "keydiff"},
    {"selector": "h2o"},
    {"selector": "expected-attention"},
    {"selector": "recent"},
    {"selector": "random"},
)
SNAPKV_OPTIONS = {"window_size", "pooling", "kernel_size", "weights"}
NUMBERS = ("7422361", "9051847")
DEPTHS = (0.1, 0.5, 0.9)
EVERYTHING = "everything kept"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one setting answered to one needle.

    Attributes:
        setting: options that differ from the defaults.
        kept_tokens: K; 0 where everything was kept.
        haystack: what the number was hidden in.
        number: the number.
        depth: where it was, from 0 to 1.
        answer: the beginning of the answer.
    """

    setting: Setting
    kept_tokens: int
    haystack: str
    number: str
    depth: float
    answer: str

    @property
    def found(self) -> bool:
        """Whether the number is in the answer."""
        return self.number in re.findall("[0-9]+", self.answer)


def settings() -> list[Setting]:
    """The defaults first, then everything else that is compared."""
    grid: list[Setting] = [
        {"window_size": window, "pooling": pooling, "kernel_size": kernel, "weights": weights}
        for window, pooling, kernel, weights in SNAPKV_GRID
    ]
    return [{}, *grid, *OTHERS]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``tidekv bench selectors``."""
    from tidekv_llm.bench.needle import HAYSTACKS

    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id or folder (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=count, default=7000, help="default: %(default)s")
    parser.add_argument("--kept-tokens", type=counts, default=[512, 1024], help="budgets (default: 512,1024)")
    parser.add_argument("--haystacks", type=names(tuple(HAYSTACKS)), default=list(HAYSTACKS), help="default: all")
    parser.add_argument("--numbers", type=_numbers, default=list(NUMBERS), help=f"default: {','.join(NUMBERS)}")
    parser.add_argument("--depths", type=_depths, default=list(DEPTHS), help="from 0 to 1 (default: 0.1,0.5,0.9)")
    add_common_arguments(parser, rounds=None)


def _numbers(text: str) -> list[str]:
    found = parts(text)
    for number in found:
        if not re.fullmatch("[0-9]{5,12}", number):
            raise argparse.ArgumentTypeError(f"{number!r} must have 5 to 12 digits, for example 7422361")
    return list(dict.fromkeys(found))


def _depths(text: str) -> list[float]:
    try:
        found = [float(part) for part in parts(text)]
    except ValueError:
        found = [-1.0]
    if not all(0 <= depth <= 1 for depth in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be depths from 0 to 1, for example 0.1,0.5,0.9")
    return list(dict.fromkeys(found))


def run(harness: Harness) -> Report:
    """Sweep and report: a table, JSON with every answer, CSV, a picture."""
    options = harness.options
    _check(options)
    jobs = [_job(options, *place) for place in itertools.product(options.haystacks, options.numbers, options.depths)]
    runs = harness.run(jobs)
    outcomes = [Outcome(**found) for job in jobs for found in runs[job.label][0]["outcomes"]]
    rows = tabulate(outcomes)
    title = f"Needles found, {options.model}, {options.prompt_tokens:,} tokens. {verdict(outcomes)}"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows))


def _check(options: argparse.Namespace) -> None:
    """What cannot be is told here, not by the first process."""
    if options.model.startswith(RANDOM_PREFIX):
        raise ConfigError(f"--model={options.model} has no tokenizer; this benchmark needs a model that can read")
    least = max(each.window_size + each.sinks for each in (_config(2**30, choice) for choice in settings()))
    for kept in options.kept_tokens:
        if not least <= kept < options.prompt_tokens:
            raise ConfigError(
                f"--kept-tokens={kept} must be at least {least} (the widest window and the sinks) "
                f"and below --prompt-tokens={options.prompt_tokens}"
            )


def _job(options: argparse.Namespace, haystack: str, number: str, depth: float) -> Job:
    arguments = {
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "kept_tokens": options.kept_tokens,
        "haystack": haystack,
        "number": number,
        "depth": depth,
        "choices": settings(),
    }
    return Job(f"{number} in {haystack} at {depth:g}", "selectors:find", arguments)


def find(
    *,
    model: str,
    prompt_tokens: int,
    kept_tokens: Sequence[int],
    haystack: str,
    number: str,
    depth: float,
    choices: Sequence[Setting],
) -> dict[str, Any]:
    """The child's work: one needle, every setting with every budget."""
    from dataclasses import asdict

    from tidekv_llm.bench.needle import ANSWER_TOKENS
    from tidekv_llm.engine import TideKV

    with TideKV.from_pretrained(model) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"--model={model} has no tokenizer; this benchmark needs a model that can read")
        if prompt_tokens + ANSWER_TOKENS > llm.context_window:
            raise ConfigError(
                f"--prompt-tokens={prompt_tokens} and an answer of {ANSWER_TOKENS} exceed the model's "
                f"{llm.context_window:,} tokens; give fewer"
            )
        outcomes = ask(llm, choices, kept_tokens, prompt_tokens, haystack=haystack, number=number, depth=depth)
    return {"outcomes": [asdict(outcome) for outcome in outcomes]}


def ask(
    llm: TideKV,
    choices: Sequence[Setting],
    kept_tokens: Sequence[int],
    prompt_tokens: int,
    *,
    haystack: str,
    number: str,
    depth: float,
) -> list[Outcome]:
    """One prefill; the answer with everything kept, and then every setting's with every budget."""
    from tidekv_llm.bench.needle import answers, make_needle

    needle = make_needle(llm, prompt_tokens, depth, number, haystack)
    cases = [(choice, kept) for kept in kept_tokens for choice in choices]
    everything = PrefillConfig(kept_tokens=len(needle.token_ids))
    configs = [_config(kept, choice) for choice, kept in cases]
    texts = answers(llm, needle.token_ids, [everything, *configs])
    return [
        Outcome(choice, kept, haystack, number, depth, text)
        for (choice, kept), text in zip([({}, 0), *cases], texts, strict=True)
    ]


def _config(kept_tokens: int, setting: Setting) -> PrefillConfig:
    return PrefillConfig().replace(kept_tokens=kept_tokens, **setting)


def tabulate(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row per setting and budget: how many needles it found, in all and in each haystack."""
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((describe(outcome), outcome.kept_tokens), []).append(outcome)
    return [
        {
            "setting": name,
            "kept_tokens": kept or None,
            "needles": len(own),
            "found": sum(outcome.found for outcome in own),
            **{
                haystack: sum(outcome.found for outcome in own if outcome.haystack == haystack)
                for haystack in dict.fromkeys(outcome.haystack for outcome in own)
            },
        }
        for (name, kept), own in groups.items()
    ]


def verdict(outcomes: Sequence[Outcome]) -> str:
    """One line: whether a SnapKV setting found more than the defaults did, over all budgets together."""
    totals: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.kept_tokens and set(outcome.setting) <= SNAPKV_OPTIONS:
            name = describe(outcome)
            totals[name] = totals.get(name, 0) + outcome.found
    asked = sum(1 for outcome in outcomes if outcome.kept_tokens and not outcome.setting)
    ours, best = next(iter(totals.values())), max(totals.values())
    if best == ours:
        return f"No SnapKV setting answers more right than the defaults ({ours} of {asked})"
    better = "; ".join(name for name, total in totals.items() if total == best)
    return f"The defaults answer {ours} of {asked} right; better, with {best}: {better}"


def describe(outcome: Outcome) -> str:
    """A setting in words: ``snapkv, W=16, max 21``, and what else differs from the defaults."""
    if not outcome.kept_tokens:
        return EVERYTHING
    setting = outcome.setting
    config = _config(outcome.kept_tokens, setting)
    name = str(config.selector)
    if name == "snapkv":
        by_kernel = config.pooling in ("max", "avg")
        pooling = f"{config.pooling} {config.kernel_size}" if by_kernel else config.pooling
        name += f", W={config.window_size}, {pooling}"
        name += "" if config.weights == "uniform" else f", {config.weights}"
    elif "window_size" in setting:
        name += f", W={config.window_size}"
    extras = [setting[key] for key in ("layer_budget", "head_budget") if key in setting]
    extras += [f"{setting['kv_bits']} bits"] if "kv_bits" in setting else []
    return ", ".join([name, *extras])


def _plot(figure: Any, rows: Sequence[Row]) -> None:
    budgets = [budget for budget in dict.fromkeys(row["kept_tokens"] for row in rows) if budget]
    settings_ = list(dict.fromkeys(row["setting"] for row in rows if row["kept_tokens"]))[::-1]
    figure.set_size_inches(9, 1.2 + 0.28 * len(settings_))
    axes = figure.subplots()
    height = 0.8 / len(budgets)
    for index, budget in enumerate(budgets):
        found = {row["setting"]: row["found"] for row in rows if row["kept_tokens"] == budget}
        places = [place - height * (index - (len(budgets) - 1) / 2) for place in range(len(settings_))]
        drawn = axes.barh(places, [found[name] for name in settings_], height=height, label=f"kept {budget:,}")
        axes.bar_label(drawn, fontsize="x-small", padding=2)
    axes.set_yticks(range(len(settings_)), settings_, fontsize="small")
    axes.set(xlabel=f"needles found of {max(row['needles'] for row in rows)}", ylim=(-0.6, len(settings_) - 0.4))
    axes.legend(loc="lower right")
