"""Construction schedules by name: TideKV's and its matched controls, one file each.

All share weights, attention and decode, and those that evict selector and budgets: only the order and the storage
differ. Each file holds how its cache is built and, beside it, what that costs.
"""

from __future__ import annotations

import importlib

from tidekv_llm.config import SCHEDULES
from tidekv_llm.schedules.base import Schedule


def schedule_names() -> tuple[str, ...]:
    """Names that ``PrefillConfig(schedule=...)`` takes."""
    return SCHEDULES


def make_schedule(name: str) -> Schedule:
    """The schedule called ``name`` (one of :func:`schedule_names`), from the file that is named after it."""
    schedule: Schedule = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").SCHEDULE
    return schedule


__all__ = ["Schedule", "make_schedule", "schedule_names"]
