"""Selectors by name: one small dataclass per file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv_llm.compress.selectors.base import Scorer, Selector
from tidekv_llm.compress.selectors.chunkkv import ChunkKV
from tidekv_llm.compress.selectors.expected_attention import ExpectedAttention
from tidekv_llm.compress.selectors.h2o import H2O
from tidekv_llm.compress.selectors.keydiff import KeyDiff
from tidekv_llm.compress.selectors.random import Random
from tidekv_llm.compress.selectors.recent import Recent
from tidekv_llm.compress.selectors.snapkv import SnapKV
from tidekv_llm.errors import ConfigError

if TYPE_CHECKING:
    from tidekv_llm.config import PrefillConfig

_REGISTRY: dict[str, type[Selector]] = {}


def register_selector(selector: type[Selector]) -> type[Selector]:
    """Make a selector class known by its ``name``; usable as a decorator.

    Raises:
        ConfigError: the name is missing or taken by another class.
    """
    name = getattr(selector, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"selector {selector.__name__} has no name; give the class a `name` string")
    if _REGISTRY.get(name, selector) is not selector:
        raise ConfigError(f"selector name {name!r} is taken by {_REGISTRY[name].__name__}; choose another")
    _REGISTRY[name] = selector
    return selector


def selector_names() -> tuple[str, ...]:
    """Names that ``PrefillConfig(selector=...)`` takes, sorted."""
    return tuple(sorted(_REGISTRY))


def make_selector(config: PrefillConfig) -> Selector:
    """The selector of a configuration: the object itself, or the named class with the options' values."""
    if isinstance(config.selector, Selector):
        return config.selector
    return _REGISTRY[config.selector].from_config(config)


for _selector in (ChunkKV, ExpectedAttention, H2O, KeyDiff, Random, Recent, SnapKV):
    register_selector(_selector)

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
