"""Construction schedules by name: TideKV's and its matched controls, one file each.

A schedule is an object with ``name`` and ``prefill(decoder, token_ids, task)``; it returns the cache and the last
token's hidden state. All share weights, attention and decode, and those that evict selector and budgets: only the
order and the storage differ.
"""

from __future__ import annotations

from tidekv_llm.schedules.base import Schedule

_MODULES = {
    "tidekv": "tidekv_llm.schedules.tidekv",
    "tidekv-no-evict": "tidekv_llm.schedules.tidekv_no_evict",
    "post-prefill": "tidekv_llm.schedules.post_prefill",
    "one-shot": "tidekv_llm.schedules.one_shot",
    "chunked": "tidekv_llm.schedules.chunked",
    "block-snapkv": "tidekv_llm.schedules.block_snapkv",
    "block-recent": "tidekv_llm.schedules.block_recent",
    "keydiff-online": "tidekv_llm.schedules.keydiff_online",
    "kivi": "tidekv_llm.schedules.kivi",
    "headinfer": "tidekv_llm.schedules.headinfer",
    "mini-sequence": "tidekv_llm.schedules.mini_sequence",
}


def schedule_names() -> tuple[str, ...]:
    """Names that ``PrefillConfig(schedule=...)`` takes."""
    return tuple(_MODULES)


def make_schedule(name: str) -> Schedule:
    """The schedule called ``name`` (one of :func:`schedule_names`)."""
    import importlib

    schedule: Schedule = importlib.import_module(_MODULES[name]).SCHEDULE
    return schedule


__all__ = ["Schedule", "make_schedule", "schedule_names"]
