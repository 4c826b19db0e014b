"""What all benchmarks share: alternating rounds of fresh processes, resuming, progress and files."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from tidekv_llm.arguments import count
from tidekv_llm.bench.children import ChildFailed, run_job
from tidekv_llm.bench.environment import commit, environment
from tidekv_llm.bench.task import Measurement
from tidekv_llm.config import AUTO_CHUNK, PrefillConfig
from tidekv_llm.errors import ConfigError

Row = dict[str, Any]
Run = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One process to run.

    Attributes:
        label: which row of the table it belongs to.
        function: ``module:name`` of what the child calls.
        arguments: its JSON arguments.
    """

    label: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def key(self, round_number: int) -> str:
        """What identifies a finished run when a benchmark is resumed."""
        text = json.dumps([self.function, dict(self.arguments), round_number], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def add_common_arguments(parser: argparse.ArgumentParser, *, rounds: int | None = 3) -> None:
    """Options of every benchmark; no ``--rounds`` where every job is a single run (None)."""
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="folder (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget what an interrupted benchmark has measured")
    if rounds is None:
        parser.set_defaults(rounds=1)
    else:
        parser.add_argument("--rounds", type=count, default=rounds, help="runs of each method (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_model_arguments(parser: argparse.ArgumentParser, *, prompt_tokens: int = 8192) -> None:
    """Options about the model and the prompt."""
    parser.add_argument("--model", default="smollm2-135m", help="or random:llama-3.1-8b (default: %(default)s)")
    parser.add_argument("--layers", type=count, help="layers of a random model (default: its own number)")
    parser.add_argument("--prompt-tokens", type=count, default=prompt_tokens, help="default: %(default)s")
    parser.add_argument("--kept-tokens", type=count, default=1024, help="default: %(default)s")
    parser.add_argument("--chunk-size", type=count, default=512, help="default: %(default)s")


def model_fields(options: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_model_arguments` parsed."""
    return {
        "model": options.model,
        "layers": options.layers,
        "prompt_tokens": options.prompt_tokens,
        "kept_tokens": options.kept_tokens,
        "chunk_size": options.chunk_size,
    }


def measurement_job(label: str, options: argparse.Namespace, method: str, **changes: Any) -> Job:
    """A job of :mod:`tidekv_llm.bench.measure` as the model's options say, but for the ``changes``."""
    return Job(label, "measure:measure_job", asdict(Measurement(method=method, **(model_fields(options) | changes))))


class Harness:
    """One benchmark's runs and results.

    Args:
        name: of the benchmark and its files.
        options: what :func:`add_common_arguments` and the benchmark's own ``add_arguments`` parsed.
        progress: called with the fraction that is done and what is being measured.

    Raises:
        ConfigError: the options of the prefill cannot be: told here, not by the first process.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, progress: Callable[[float, str], None] = lambda *_: None
    ) -> None:
        self.name, self.options, self._progress = name, options, progress
        if isinstance(getattr(options, "kept_tokens", None), int):
            PrefillConfig(kept_tokens=options.kept_tokens, chunk_size=getattr(options, "chunk_size", AUTO_CHUNK))
        self.folder: Path = options.out
        self._log = self.folder / f"{name}.runs.jsonl"
        self._commit = commit()

    @cached_property
    def _done(self) -> dict[str, Run]:
        """Runs of an interrupted benchmark, of the same commit; a line that was cut off is ignored."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out={self.folder} cannot be made a folder ({error.strerror})") from error
        if self.options.fresh:
            self._log.unlink(missing_ok=True)
        done: dict[str, Run] = {}
        if self._log.exists():
            for line in self._log.read_text("utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    if entry["commit"] == self._commit:
                        done[entry["key"]] = entry["run"]
                except (ValueError, KeyError, TypeError):
                    continue
        return done

    def run(self, jobs: Sequence[Job]) -> dict[str, list[Run]]:
        """Runs per label: every round runs all jobs, each in a fresh process, and every second one backwards.

        Raises:
            ChildFailed: a process failed.
        """
        todo = [(number, job) for number in range(self.options.rounds) for job in jobs[:: -1 if number % 2 else 1]]
        runs: dict[str, list[Run]] = {job.label: [] for job in jobs}
        for done, (number, job) in enumerate(todo):
            self._progress(done / len(todo), f"{done + 1} of {len(todo)}: {job.label}")
            runs[job.label].append(self._result(job, number))
        return runs

    def try_run(self, job: Job, fraction: float) -> Run | None:
        """One run outside of rounds; None if its process failed, for want of memory most likely.

        Args:
            job: what to run.
            fraction: how much of the benchmark is done.

        Raises:
            ChildFailed: what was asked for cannot be.
        """
        self._progress(fraction, job.label)
        try:
            return self._result(job, 0)
        except ChildFailed as error:
            if error.refused:
                raise
            return None

    def _result(self, job: Job, round_number: int) -> Run:
        """A finished run, or a new one that is remembered at once."""
        key = job.key(round_number)
        if key not in self._done:
            run = run_job(job.function, job.arguments)
            entry = {"key": key, "commit": self._commit, "label": job.label, "at": time.time(), "run": run}
            with self._log.open("a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
            self._done[key] = run
        return self._done[key]

    def finish(
        self, rows: Sequence[Row], *, runs: Any = None, title: str = "", plot: Callable[[Any], None] | None = None
    ) -> Report:
        """Write JSON, CSV and the picture, and say what was found."""
        result = {"benchmark": self.name, "environment": environment(), "rows": list(rows)}
        report = Report(
            title or self.name, rows, result, [self.folder / f"{self.name}{end}" for end in (".json", ".csv")]
        )
        report.paths[0].write_text(json.dumps({**result, "runs": runs}, indent=1), "utf-8")
        _write_csv(report.paths[1], report)
        if plot is not None:
            _draw(self.folder / self.name, plot, report)
        self._log.unlink(missing_ok=True)  # it is all in the JSON; the next call measures anew
        return report


@dataclass
class Report:
    """What a benchmark found.

    Attributes:
        title: what was measured, one line.
        rows: the table.
        result: rows and environment as JSON types.
        paths: the files that were written.
        note: what a reader of the list of files must know.
    """

    title: str
    rows: Sequence[Row]
    result: dict[str, Any]
    paths: list[Path]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        """Keys of all rows in order of appearance, lists left to the JSON."""
        found = {key: None for row in self.rows for key, value in row.items() if not isinstance(value, list | dict)}
        return list(found)


def summary(runs: Sequence[Run], name: str) -> tuple[float, float]:
    """Median and spread (highest minus lowest) of a figure."""
    values = [float(run[name]) for run in runs]
    return float(median(values)), max(values) - min(values)


def mib(nbytes: float) -> float:
    """Bytes as MiB, two decimals."""
    return round(nbytes / 2**20, 2)


def _write_csv(path: Path, report: Report) -> None:
    """Rows with the environment in columns of their own, so that files can be put together."""
    about = {f"env_{name}": value for name, value in report.result["environment"].items()}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*report.columns, *about], extrasaction="ignore")
        writer.writeheader()
        for row in report.rows:
            writer.writerow({**row, **about})


def _draw(stem: Path, plot: Callable[[Any], None], report: Report) -> None:
    """PNG and SVG next to the table; without matplotlib a word about it."""
    try:
        import matplotlib
    except ImportError:
        report.note = "; no picture: install the extra tidekv-llm[bench] for matplotlib"
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 4.5), layout="constrained")
    plot(figure)
    for suffix in (".png", ".svg"):
        report.paths.append(stem.with_suffix(suffix))
        figure.savefig(report.paths[-1], dpi=150)
    pyplot.close(figure)


def bars(axes: Any, labels: Iterable[str], values: Iterable[float], title: str, unit: str) -> None:
    """A bar chart with a number on each bar."""
    drawn = axes.bar(list(labels), list(values))
    axes.bar_label(drawn, fmt="%.3g")
    axes.set(title=title, ylabel=unit)
    axes.tick_params(axis="x", rotation=30)
