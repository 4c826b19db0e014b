"""What an answer takes in memory: the planner's numbers, for the chosen settings and for what is compared."""

from __future__ import annotations

from tidekv_apps.settings import AskSettings
from tidekv_llm import planner
from tidekv_llm.config import AUTO_CHUNK, PrefillConfig
from tidekv_llm.costs.plan import Plan
from tidekv_llm.errors import TideKVError
from tidekv_llm.service import ModelFacts

COMPARED = ("tidekv", "post-prefill", "one-shot")


def predict(facts: ModelFacts, tokens: int, settings: AskSettings, schedule: str, chunk: int = 0) -> dict[str, int]:
    """The planner's components of one schedule at its peak, in bytes."""
    config = _config(facts, tokens, settings, chunk).replace(schedule="tidekv")
    plan = Plan(facts.shape, tokens, config, device=facts.devices[0].type, reserve=settings.max_new_tokens)
    return dict(planner.predict(schedule, plan).at_peak)


def predictions(facts: ModelFacts, tokens: int, settings: AskSettings, chunk: int = 0) -> dict[str, dict[str, int]]:
    """Components of the schedules that every answer is compared with."""
    return {schedule: predict(facts, tokens, settings, schedule, chunk) for schedule in COMPARED}


def _config(facts: ModelFacts, tokens: int, settings: AskSettings, chunk: int = 0) -> PrefillConfig:
    """The user's configuration with a chunk size that is a number."""
    config = settings.prefill()
    if not chunk and config.chunk_size == AUTO_CHUNK:
        chunk = planner.choose_chunk_size(facts.shape, tokens, config, facts.devices, settings.max_new_tokens)
    return config.replace(chunk_size=chunk) if chunk else config


def memory_problem(facts: ModelFacts, tokens: int, settings: AskSettings) -> str:
    """Why the settings cannot run for so many tokens, with the planner's numbers; empty if they can."""
    try:
        config = _config(facts, tokens, settings)
        planner.require_memory(facts.shape, tokens, config, facts.devices, settings.max_new_tokens)
    except TideKVError as error:
        return str(error)
    return ""
