"""PrefillConfig: every impossible value is refused with the value and the remedy."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidekv_llm
from tidekv_llm import PrefillConfig
from tidekv_llm.compress.selectors import Recent, make_selector
from tidekv_llm.config import SCHEDULES, NamedSelector, selector_names
from tidekv_llm.errors import BudgetError, ConfigError, TideKVError
from tidekv_llm.schedules import make_schedule

WHOLE = "must be a whole number of at least"
CASES: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, f"{name}={value!r} {WHOLE} 1")
        for name in ("chunk_size", "kept_tokens", "window_size", "score_block_size", "kernel_size")
        for value in (0, -1, 1.5, "7", None, True)
    ),
    ({"chunk_size": "Auto"}, f"chunk_size='Auto' {WHOLE} 1 or \"auto\""),
    ({"sinks": -1}, f"sinks=-1 {WHOLE} 0"),
    ({"sinks": 1.0}, f"sinks=1.0 {WHOLE} 0"),
    ({"sinks": False}, f"sinks=False {WHOLE} 0"),
    ({"kernel_size": 4}, "kernel_size=4 must be odd; use 5"),
    ({"pooling": "mean"}, "pooling='mean' is unknown; choose one of passage, max, avg, none"),
    ({"attention": "fast"}, "attention='fast' is unknown; choose one of auto, tiled, merge, sdpa, flash"),
    ({"selector": "snap"}, "selector='snap' is unknown; choose one of .*recent, snapkv"),
    ({"selector": 3}, r"selector=3 must be a name \(.*recent, snapkv\) or a Selector"),
    ({"selector": Recent}, "or a Selector"),
    ({"layer_budget": "x"}, "layer_budget='x' is unknown; choose one of uniform"),
    ({"head_budget": "x"}, "head_budget='x' is unknown; choose one of uniform"),
    ({"schedule": "x"}, "schedule='x' is unknown; choose one of tidekv, tidekv-no-evict, post-prefill"),
    ({"pooling": []}, r"pooling=\[\] is unknown"),
]


@pytest.mark.parametrize(("options", "message"), CASES, ids=[str(options) for options, _ in CASES])
def test_an_impossible_option_is_named_with_its_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        PrefillConfig(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kept", "window", "sinks"), [(16, 32, 4), (19, 16, 4), (1, 1, 1)])
def test_a_budget_below_window_and_sinks_names_the_smallest_one(kept: int, window: int, sinks: int) -> None:
    total = window + sinks
    message = rf"kept_tokens={kept} must be at least window_size\+sinks={total}; raise kept_tokens to {total} or more"
    with pytest.raises(BudgetError, match=message):
        PrefillConfig(kept_tokens=kept, window_size=window, sinks=sinks)
    PrefillConfig(kept_tokens=total, window_size=window, sinks=sinks)


def test_errors_are_ours_and_value_errors() -> None:
    for kind in (ValueError, TideKVError):
        with pytest.raises(kind):
            PrefillConfig(kept_tokens=1)


def test_unknown_options_are_errors_that_name_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown prefill option 'chunksize'; the options are chunk_size, kept_tok"):
        PrefillConfig().replace(chunksize=7)
    with pytest.raises(TypeError, match="chunksize"):
        PrefillConfig(chunksize=7)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        PrefillConfig(512)  # type: ignore[misc]


def test_replace_validates_and_leaves_the_original() -> None:
    config = PrefillConfig()
    assert config.replace(chunk_size=7) == PrefillConfig(chunk_size=7)
    assert config == PrefillConfig()
    with pytest.raises(ConfigError, match="chunk_size=0"):
        config.replace(chunk_size=0)


def test_a_config_is_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrefillConfig().chunk_size = 7  # type: ignore[misc]
    assert len({PrefillConfig(), PrefillConfig(), PrefillConfig(sinks=0)}) == 2


def test_a_selector_object_is_taken_as_it_is() -> None:
    assert PrefillConfig(selector=Recent()).selector == Recent()


def test_every_name_has_its_file_and_every_file_its_name() -> None:
    package = Path(tidekv_llm.__file__).parent
    for name in SCHEDULES:
        assert make_schedule(name).name == name
    assert {path.stem for path in (package / "schedules").glob("*.py")} >= {
        name.replace("-", "_") for name in SCHEDULES
    }
    files = {path.stem for path in (package / "compress" / "selectors").glob("*.py")} - {"__init__", "base"}
    assert files == {name.replace("-", "_") for name in selector_names()}
    assert [make_selector(PrefillConfig(selector=name)).name for name in selector_names()] == list(selector_names())


def test_what_looks_like_a_selector_but_scores_nothing_is_refused() -> None:
    class Nameless(NamedSelector):
        pass

    class Idle(NamedSelector):
        name = "idle"

    with pytest.raises(ConfigError, match="Nameless has no name"):
        PrefillConfig(selector=Nameless())
    with pytest.raises(ConfigError, match="Idle scores nothing"):
        make_selector(PrefillConfig(selector=Idle()))


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("from tidekv_llm import PrefillConfig; PrefillConfig(selector='h2o', schedule='kivi')", ""),
        ("from tidekv_llm import PrefillConfig; PrefillConfig(schedule='x')", "choose one of tidekv, "),
        ("from tidekv_llm.cli import main; main(['ask', 'nowhere.pdf', 'Why?'])", "no file 'nowhere.pdf'"),
        (
            "from tidekv_llm.cli import main; main(['ask', 'nowhere.pdf', 'Why?', '--selector=x'])",
            "selector='x' is unknown",
        ),
    ],
)
def test_torch_is_not_imported_to_refuse(program: str, says: str, tmp_path: Path) -> None:
    tail = "atexit.register(lambda: print('torch' in sys.modules, 'transformers' in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys; {tail}; {program}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.stdout == "False False\n"
    assert says in found.stderr
