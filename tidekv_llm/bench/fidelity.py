"""Whether the schedules encode the prompt as one whole forward does (Table 8 and Fig. 6).

The reference is ``one-shot``: the model's own forward with its own attention. Each prompt is one fresh process that
computes the reference once and every method against it; numerics do not depend on who shares the process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidekv_llm.arguments import count, counts, names
from tidekv_llm.bench.harness import Harness, Job, Report, Row, add_common_arguments, add_model_arguments, model_fields
from tidekv_llm.schedules import schedule_names

if TYPE_CHECKING:
    from torch import Tensor

    from tidekv_llm.engine import TideKV

METHODS = ("chunked", "tidekv-no-evict", "tidekv", "block-snapkv", "block-recent")
EVICTING = ("block-snapkv", "block-recent")
# Logits are compared at every so-many-th position: a vocabulary at every position would take gigabytes.
LOGIT_STEP = 16
FIGURES = ("relative_l2", "cosine", "top1_agreement", "js_divergence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    add_model_arguments(parser)
    add_common_arguments(parser, rounds=None)
    parser.add_argument("--prompts", type=count, default=10, help="different prompts (default: %(default)s)")
    parser.add_argument("--methods", type=names(schedule_names()), default=list(METHODS), help="comma-separated")
    budgets = [256, 512, 1024, 2048]
    parser.add_argument("--budgets", type=counts, default=budgets, help="for the drift per budget (default: to 2048)")
    parser.add_argument("--budget-prompts", type=count, default=1, help="prompts for it (default: %(default)s)")


def run(harness: Harness) -> Report:
    """Measure and report."""
    options = harness.options
    jobs = [_job(options, index) for index in range(options.prompts)]
    runs = harness.run(jobs)
    results = [runs[job.label][0] for job in jobs]
    rows = [_row(method, [result["methods"][method] for result in results]) for method in options.methods]
    floor = next((row["relative_l2"] for row in rows if row["method"] == "chunked"), None)
    for row in rows:
        row["times_chunked"] = round(row["relative_l2"] / floor, 2) if floor else None
    title = f"{options.model}, {options.prompt_tokens:,} tokens, {options.prompts} prompts, against one-shot"
    return harness.finish(rows, runs=runs, title=title, plot=lambda figure: _plot(figure, rows, results))


def _job(options: argparse.Namespace, index: int) -> Job:
    arguments = {
        **model_fields(options),
        "prompt_index": index,
        "methods": options.methods,
        "budgets": options.budgets if index < options.budget_prompts else [],
    }
    return Job(f"prompt {index + 1}", "fidelity:compare", arguments)


def compare(
    *,
    model: str,
    layers: int | None,
    prompt_tokens: int,
    kept_tokens: int,
    chunk_size: int,
    prompt_index: int,
    methods: Sequence[str],
    budgets: Sequence[int],
) -> dict[str, Any]:
    """The child's work: one prompt, every method."""
    from tidekv_llm.bench.models import make_prompt, open_model
    from tidekv_llm.config import PrefillConfig

    config = PrefillConfig(kept_tokens=kept_tokens, chunk_size=chunk_size)
    with open_model(model, config=config, needed_tokens=prompt_tokens, layers=layers) as llm:
        prompt = make_prompt(llm, prompt_tokens, prompt_index)
        return compare_schedules(llm, prompt, methods=methods, budgets=budgets)


def compare_schedules(
    llm: TideKV, prompt: Sequence[int], *, methods: Sequence[str], budgets: Sequence[int] = ()
) -> dict[str, Any]:
    """Every method's figures against one-shot, and the immediate evictions' relative L2 at each budget."""
    reference = _Encoded(llm, prompt, "one-shot")
    chunk = int(llm.config.chunk_size)
    found = {method: reference.against(_Encoded(llm, prompt, method), chunk) for method in methods}
    drift: dict[str, dict[str, float]] = {}
    for method in ("tidekv", *EVICTING):
        if method in methods and budgets:
            drift[method] = {}
            for budget in budgets:
                if budget == llm.config.kept_tokens:
                    value = found[method]["relative_l2"]
                else:
                    value = reference.relative_l2(_Encoded(llm, prompt, method, kept_tokens=budget))
                drift[method][str(budget)] = value
    return {"methods": found, "budgets": drift}


class _Encoded:
    """A prompt's final hidden states, after the last norm: what the head sees."""

    def __init__(self, llm: TideKV, prompt: Sequence[int], schedule: str, **changes: Any) -> None:
        import torch

        decoder = llm._open().decoder
        engine = llm.with_prefill(schedule=schedule, **changes)
        hidden = engine.prefill(prompt, all_outputs=True).hidden
        self._head = decoder
        self.raw = hidden
        with torch.no_grad():
            self.normed: Tensor = decoder.backbone.norm(hidden).float()
        engine.close()

    def relative_l2(self, other: _Encoded) -> float:
        """Norm of the difference over the norm of this one, over all positions."""
        return float((other.normed - self.normed).norm() / self.normed.norm())

    def against(self, other: _Encoded, chunk_size: int) -> dict[str, Any]:
        """All figures of ``other`` with this one as the reference."""
        import torch

        cosine = torch.nn.functional.cosine_similarity(self.normed, other.normed, dim=-1)
        agreement, divergence = self._next_tokens(other)
        return {
            "relative_l2": self.relative_l2(other),
            "cosine": float(cosine.mean()),
            "top1_agreement": agreement,
            "js_divergence": divergence,
            "per_chunk": [
                float((found - own).norm() / own.norm())
                for own, found in zip(_pieces(self.normed, chunk_size), _pieces(other.normed, chunk_size), strict=True)
            ],
        }

    def _next_tokens(self, other: _Encoded) -> tuple[float, float]:
        """Share of equal most likely tokens and mean Jensen-Shannon divergence (nats), at every 16th position."""
        import torch

        equal, divergence, count = 0, 0.0, 0
        with torch.no_grad():
            sampled = (part[LOGIT_STEP - 1 :: LOGIT_STEP] for part in (self.raw, other.raw))
            for own, found in zip(*(_pieces(part, 64) for part in sampled), strict=True):
                first, second = (self._head.logits(part).log_softmax(-1) for part in (own, found))
                middle = torch.logaddexp(first, second) - torch.log(torch.tensor(2.0))
                kl = [(one.exp() * (one - middle)).sum(-1) for one in (first, second)]
                divergence += float((kl[0] + kl[1]).sum() / 2)
                equal += int((first.argmax(-1) == second.argmax(-1)).sum())
                count += len(own)
        return equal / max(1, count), divergence / max(1, count)


def _pieces(tensor: Tensor, size: int) -> list[Tensor]:
    """Rows of a tensor, ``size`` at a time."""
    return [tensor[start : start + size] for start in range(0, len(tensor), size)]


def _row(method: str, found: list[dict[str, Any]]) -> Row:
    from statistics import mean

    row: Row = {"method": method, **{name: mean(one[name] for one in found) for name in FIGURES}}
    values = [one["relative_l2"] for one in found]
    row["relative_l2_spread"] = max(values) - min(values)
    row["per_chunk"] = [mean(column) for column in zip(*(one["per_chunk"] for one in found), strict=True)]
    return row


def _plot(figure: Any, rows: list[Row], results: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    left, right = figure.subplots(1, 2)
    colours = {row["method"]: f"C{index}" for index, row in enumerate(rows)}
    for index, row in enumerate(rows):
        # Exact schedules lie on one another: each mark starts at a chunk of its own, and so all are seen.
        style = {"marker": "osD^v"[index % 5], "markevery": (index, 5), "color": colours[row["method"]]}
        left.plot(range(1, len(row["per_chunk"]) + 1), row["per_chunk"], label=row["method"], **style)
    left.set(xlabel="chunk", ylabel="relative L2", title="Drift per chunk", yscale="log")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    budgets: dict[str, dict[str, float]] = next((result["budgets"] for result in results if result["budgets"]), {})
    for method, values in budgets.items():
        right.plot([int(budget) for budget in values], list(values.values()), marker="o", color=colours[method])
        right.set_xscale("log", base=2)
        right.set_xticks([int(budget) for budget in values], list(values))
    right.set(xlabel="kept tokens", title="Drift per budget", yscale="log")
    for axes in (left, right):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
