"""The commands: what they print, and that bad input is one line."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tidekv_llm.bench import BENCHMARKS
from tidekv_llm.cli import main, parser
from tidekv_llm.cli.bench import benchmark


def every_parser() -> Iterator[argparse.ArgumentParser]:
    """Of the commands, of their actions, and of the benchmarks."""
    waiting = [parser()]
    waiting += [benchmark(name, type(waiting[0]))[1] for name in BENCHMARKS]
    while waiting:
        one = waiting.pop()
        yield one
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()


def refusal(one: argparse.ArgumentParser, action: argparse.Action, text: str) -> str:
    """What is said about a value; empty if it is taken."""
    try:
        one._get_value(action, text)
    except argparse.ArgumentError as error:
        return f"{one.prog}: {error}"
    return ""


@pytest.mark.parametrize("text", ["x", "", "1.5", "--", "1e999", "9" * 5000])
def test_no_option_answers_with_a_name_from_the_code(text):
    options = [(one, action) for one in every_parser() for action in one._actions if action.type is not None]
    refusals = [refusal(one, action, text) for one, action in options]
    assert sum(map(bool, refusals)) > 40
    assert [each for each in refusals if re.search(r": invalid \w+ value", each)] == []


def test_every_benchmark_has_a_module():
    for name in BENCHMARKS:
        assert find_spec(f"tidekv_llm.bench.{name.replace('-', '_')}") is not None


def test_plan_prints_json_and_a_table(capsys):
    command = ["plan", "--model", "random:llama-3.1-8b", "--context", "65536", "--device-memory", "24GiB"]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        assert {"schedule", "peak_allocated_bytes", "transient_bytes", "components", "fits"} <= set(row)
    tide = next(row for row in rows if row["schedule"] == "tidekv")
    assert tide["components"]["compressed_cache"] == 512 * 2**20
    assert tide["fits"] is True
    assert main(command) == 0
    assert "post-prefill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", "--device-memory", "lots"], 2, "is no size"),
        (["plan", "--context", "0"], 2, "'0' must be a whole number of at least 1"),
        (["plan", "--chunk-size", "x"], 2, "argument --chunk-size: 'x' must be a whole number of at least 1, or auto"),
        (["plan", "--kept-tokens", "many"], 2, "argument --kept-tokens: 'many' must be a whole number"),
        (["ask", "a.pdf", "Why?", "--max-new-tokens", "1.5"], 2, "'1.5' must be a whole number"),
        (["ask", "a.pdf"], 2, "'a.pdf' is the only argument; give one file or more, then the question"),
        (["ask", "a.pdf", " "], 2, "the question is empty"),
        (["ask", "a.pdf", "Why?", "--drafts", "-1"], 2, "drafts=-1 must be a whole number of at least 0"),
        (["ask", "a.pdf", "--questions", "/nowhere/q.txt"], 2, "--questions /nowhere/q.txt: No such file"),
        (["ask", "a.pdf", "--questions", "/dev/null"], 2, "there is no question in it; write one a line"),
        (["bench", "sessions", "--stores", "memory,cloud"], 2, "'cloud' is unknown; choose from memory, disk, int8"),
        (["plan", "--context", "1" + 26 * "0"], 2, "must be at most"),
        (["plan", "--model", "random:nothing"], 1, "llama-3.1-8b"),
        (["bench", "nothing"], 2, "invalid choice"),
        (["bench", "memory", "--methods", "nothing"], 2, "unknown"),
        (["bench", "selectors", "--depths", "2"], 2, "depths from 0 to 1"),
        (["bench", "selectors", "--numbers", "74223,x"], 2, "'x' must have 5 to 12 digits"),
        (["bench", "selectors", "--haystacks", "hay"], 2, "choose from prose"),
        (["bench", "selectors", "--numbers", ""], 2, "it is empty"),
        (["bench", "selectors", "--kept-tokens", "512,30"], 2, "--kept-tokens=30 must be at least 68"),
        (["bench", "selectors", "--prompt-tokens", "900"], 2, "--kept-tokens=1024 must be"),
        (["bench", "selectors", "--model", "random:smollm2-135m"], 2, "has no tokenizer"),
        (["bench", "capacity", "--step", "0"], 2, "'0' must be a whole number"),
        (["bench", "memory", "--methods", ""], 2, "it is empty"),
        (["bench", "memory", "--model", "no/such", "--lengths", "64"], 1, "no model 'no/such'"),
        (["plan", "--device-memory", ""], 2, "is no size"),
        (["bench", "fidelity", "--prompts", "0"], 2, "'0' must be a whole number of at least 1"),
        (["bench", "fidelity", "--kept-tokens", "3"], 2, "kept_tokens=3"),
        (["bench", "persistent", "--requests", "7"], 2, "must be at least 15"),
        (["bench", "capacity", "--memory-limit", "256"], 2, "write a unit, such as 24GiB"),
        (["bench", "chunks", "--sizes", ","], 2, "it is empty"),
        (["bench", "sessions", "--document-tokens", "x"], 2, "'x' must be a whole number"),
        (["plan", "--device-memory", "24"], 2, "write a unit, such as 24GiB"),
        (["bench", "memory", "--out", "/dev/null/x"], 2, "cannot be made a folder"),
    ],
)
def test_bad_input_is_one_line(arguments, code, message, capsys):
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
