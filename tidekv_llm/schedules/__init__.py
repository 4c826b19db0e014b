"""Construction schedules by name: TideKV's and its matched controls, one file each.

A schedule is an object with ``name`` and ``prefill(decoder, token_ids, job)``; it returns the cache and the last
token's hidden state. All share weights, selector, budgets, attention and decode: only the order differs.
"""

from __future__ import annotations

from tidekv_llm.schedules.base import Job, Schedule

_MODULES = {
    "tidekv": "tidekv_llm.schedules.tidekv",
    "post-prefill": "tidekv_llm.schedules.post_prefill",
}


def schedule_names() -> tuple[str, ...]:
    """Names that ``PrefillConfig(schedule=...)`` takes."""
    return tuple(_MODULES)


def make_schedule(name: str) -> Schedule:
    """The schedule called ``name`` (one of :func:`schedule_names`)."""
    import importlib

    schedule: Schedule = importlib.import_module(_MODULES[name]).SCHEDULE
    return schedule


__all__ = ["Job", "Schedule", "make_schedule", "schedule_names"]
