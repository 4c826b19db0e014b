"""What all benchmarks share: alternating rounds of fresh processes, resuming, progress, tables and files."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tidekv_llm.bench.children import ChildFailed, run_job
from tidekv_llm.bench.environment import commit, environment
from tidekv_llm.bench.task import Measurement
from tidekv_llm.config import PrefillConfig
from tidekv_llm.errors import ConfigError

FILE_WIDTH = 240
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


def measurement_job(label: str, options: argparse.Namespace, method: str, **changes: Any) -> Job:
    """A job of :mod:`tidekv_llm.bench.measure` as the model's options say, but for the ``changes``."""
    fields = {
        "model": options.model,
        "layers": options.layers,
        "prompt_tokens": options.prompt_tokens,
        "kept_tokens": options.kept_tokens,
        "chunk_size": options.chunk_size,
    }
    return Job(label, "measure:measure_job", asdict(Measurement(method=method, **(fields | changes))))


def count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def parts(text: str) -> list[str]:
    """What stands between the commas, at least one."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise argparse.ArgumentTypeError("it is empty; give one or more, separated by commas")
    return found


def counts(text: str) -> list[int]:
    """``512,1024`` as numbers, for argparse."""
    return [count(part) for part in parts(text)]


def names(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A comma-separated list out of ``allowed``, for argparse."""

    def parse(text: str) -> list[str]:
        chosen = parts(text)
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; choose from {', '.join(allowed)}")
        return chosen

    return parse


class Harness:
    """One benchmark's runs and results.

    Args:
        name: of the benchmark and its files.
        options: what :func:`add_common_arguments` parsed.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        if hasattr(options, "chunk_size"):  # a wrong option is told here, not by the first process
            PrefillConfig(kept_tokens=options.kept_tokens, chunk_size=options.chunk_size)
        self.folder: Path = options.out
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out={self.folder} cannot be made a folder ({error.strerror})") from error
        self._log = self.folder / f"{name}.runs.jsonl"
        if options.fresh:
            self._log.unlink(missing_ok=True)
        self._commit = commit()
        self._done = self._read_log()

    def _read_log(self) -> dict[str, Run]:
        """Runs of an interrupted benchmark, of the same commit; a line that was cut off is ignored."""
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
        with self._progress(len(todo)) as advance:
            for number, job in todo:
                advance(f"{job.label}, round {number + 1}", 0)
                key = job.key(number)
                if key not in self._done:
                    self._remember(key, job, run_job(job.function, job.arguments))
                runs[job.label].append(self._done[key])
                advance("", 1)
        return runs

    def try_run(self, job: Job) -> Run | None:
        """One run outside of rounds; None if its process failed, for want of memory most likely.

        Raises:
            ChildFailed: what was asked for cannot be.
        """
        key = job.key(0)
        if key not in self._done:
            try:
                self._remember(key, job, run_job(job.function, job.arguments))
            except ChildFailed as error:
                if error.refused:
                    raise
                return None
        return self._done[key]

    def _remember(self, key: str, job: Job, run: Run) -> None:
        self._done[key] = run
        entry = {"key": key, "commit": self._commit, "label": job.label, "at": time.time(), "run": run}
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")

    def _progress(self, total: int) -> Any:
        return _Bar(total, self.name, hidden=self.options.json)

    def finish(
        self, rows: Sequence[Row], *, runs: Any = None, title: str = "", plot: Callable[[Any], None] | None = None
    ) -> int:
        """Write JSON, CSV and the picture, print the table; returns the exit code."""
        result = {"benchmark": self.name, "environment": environment(), "rows": list(rows), "runs": runs}
        paths = [self.folder / f"{self.name}.json", self.folder / f"{self.name}.csv"]
        paths[0].write_text(json.dumps(result, indent=1), "utf-8")
        _write_csv(paths[1], rows, result["environment"])
        note = _draw(self.folder / self.name, plot, paths)
        self._log.unlink(missing_ok=True)  # it is all in the JSON; the next call measures anew
        if self.options.json:
            print(json.dumps({key: value for key, value in result.items() if key != "runs"}))
            return 0
        show_table(rows, title or self.name)
        print(f"\nwritten: {', '.join(str(path) for path in paths)}{note}")
        return 0


class _Bar:
    """A progress bar with the estimated time left, on standard error."""

    def __init__(self, total: int, name: str, *, hidden: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("[dim]{task.fields[doing]}"),
        )
        console = Console(stderr=True)
        self._progress = Progress(
            *columns,
            console=console,
            transient=True,
            disable=hidden or not console.is_terminal,
            speed_estimate_period=3600,
        )
        self._task = self._progress.add_task(name, total=total, doing="")

    def __enter__(self) -> Callable[[str, int], None]:
        self._progress.start()
        return lambda doing, steps: self._progress.update(self._task, advance=steps, doing=doing)

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()


def summary(runs: Sequence[Run], name: str) -> tuple[float, float]:
    """Median and spread (highest minus lowest) of a figure."""
    values = [float(run[name]) for run in runs]
    return float(median(values)), max(values) - min(values)


def mib(nbytes: float) -> float:
    """Bytes as MiB, two decimals."""
    return round(nbytes / 2**20, 2)


def show_table(rows: Sequence[Row], title: str) -> None:
    """Rows of equal keys as a table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, heading in enumerate(columns_of(rows)):
        table.add_column(heading.replace("_", " "), justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*(_cell(row.get(heading)) for heading in columns_of(rows)))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = FILE_WIDTH
    console.print(table)


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Keys of all rows in order of appearance, lists left to the JSON."""
    seen = {key: None for row in rows for key, value in row.items() if not isinstance(value, list | dict)}
    return list(seen)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.4f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return str(value)


def _write_csv(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> None:
    """Rows with the environment in columns of their own, so that files can be put together."""
    headings = columns_of(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*headings, *(f"env_{name}" for name in about)], extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, **{f"env_{name}": value for name, value in about.items()}})


def _draw(stem: Path, plot: Callable[[Any], None] | None, paths: list[Path]) -> str:
    """PNG and SVG next to the table; without matplotlib a word about it."""
    if plot is None:
        return ""
    try:
        import matplotlib
    except ImportError:
        return "; no picture: install the extra tidekv-llm[bench] for matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(9, 4.5), layout="constrained")
    plot(figure)
    for suffix in (".png", ".svg"):
        paths.append(stem.with_suffix(suffix))
        figure.savefig(paths[-1], dpi=150)
    pyplot.close(figure)
    return ""


def bars(axes: Any, labels: Iterable[str], values: Iterable[float], title: str, unit: str) -> None:
    """A bar chart with a number on each bar."""
    drawn = axes.bar(list(labels), list(values))
    axes.bar_label(drawn, fmt="%.3g")
    axes.set(title=title, ylabel=unit)
    axes.tick_params(axis="x", rotation=30)
