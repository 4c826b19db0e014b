"""Selectors by name: one small dataclass per file, found by its name when a config asks for it."""

from __future__ import annotations

import importlib

from tidekv_llm.compress.selectors.base import Scorer, Selector, register_selector
from tidekv_llm.compress.selectors.chunkkv import ChunkKV
from tidekv_llm.compress.selectors.expected_attention import ExpectedAttention
from tidekv_llm.compress.selectors.h2o import H2O
from tidekv_llm.compress.selectors.keydiff import KeyDiff
from tidekv_llm.compress.selectors.random import Random
from tidekv_llm.compress.selectors.recent import Recent
from tidekv_llm.compress.selectors.snapkv import SnapKV
from tidekv_llm.config import SELECTORS, PrefillConfig, selector_names
from tidekv_llm.errors import ConfigError


def make_selector(config: PrefillConfig) -> Selector:
    """The selector of a configuration: the object itself, or the named class with the options' values."""
    chosen = config.selector
    if isinstance(chosen, str):
        if SELECTORS[chosen] is None:
            importlib.import_module(f"{__name__}.{chosen.replace('-', '_')}")  # registers itself
        kind = SELECTORS[chosen]
        assert kind is not None and issubclass(kind, Selector)
        return kind.from_config(config)
    if not isinstance(chosen, Selector):
        raise ConfigError(f"selector {type(chosen).__name__} scores nothing; derive it from tidekv_llm.Selector")
    return chosen


__all__ = [
    "H2O",
    "ChunkKV",
    "ExpectedAttention",
    "KeyDiff",
    "Random",
    "Recent",
    "Scorer",
    "Selector",
    "SnapKV",
    "make_selector",
    "register_selector",
    "selector_names",
]
