"""The planner: memory of a construction from the model's dimensions alone (paper, Eqs. 1 and 9).

A schedule's peak is the highest of a few moments, and each moment is a sum of components: the retained caches so
far, the active layer's full KV, the hidden bridge, one step's activations, and scratch. Every schedule knows its own
(``Schedule.cost``, from the terms in :mod:`tidekv_llm.costs`).

Beyond the model: the CUDA context and what the allocator keeps in reserve (:data:`RUNTIME_BYTES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

from tidekv_llm.config import AUTO_CHUNK, SCHEDULES, PrefillConfig
from tidekv_llm.costs.plan import COMPONENTS, Components, Plan
from tidekv_llm.errors import MemoryLimitError
from tidekv_llm.memory import available_bytes, reusable_bytes
from tidekv_llm.schedules import make_schedule
from tidekv_llm.shapes import ModelShape
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    import torch

CHUNK_SIZES = (2048, 1024, 512, 256, 128)
# No device has less; a number without a unit means bytes.
LEAST_MEMORY = 2**20
# What a CUDA process holds beside its tensors: context, kernels, the allocator's reserve. The paper's A100 figures
# (64K, NVML minus peak allocated: 17.283 - 16.639) give 0.64 GiB for TideKV; a CPU process has no such thing.
RUNTIME_BYTES = int(0.64 * 2**30)
# Searching the longest prompt: in steps of this many tokens, up to the largest window of any model today.
PROMPT_STEP, PROMPT_LIMIT = 256, 16 * 2**20

# One device, or all that a model is spread over.
Device = Union["torch.device", str, Sequence["torch.device"]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a schedule needs.

    Attributes:
        schedule: its name.
        peak_allocated_bytes: highest sum of live tensors, weights included.
        steady_bytes: what stays once the cache is built: weights, cache and bookkeeping.
        transient_bytes: peak minus steady.
        components: the most bytes of each component. They do not all peak at once, so their sum can be above the peak
            (the retained caches are complete only when the last step is over).
        at_peak: bytes of each component at the peak; they add up to it.
        host_bytes: beside it in host memory (offloaded caches, a host bridge).
    """

    schedule: str
    peak_allocated_bytes: int
    steady_bytes: int
    transient_bytes: int
    components: Components = field(default_factory=dict)
    at_peak: Components = field(default_factory=dict)
    host_bytes: int = 0

    def fits(self, device_memory: int, device: str = "cuda") -> bool:
        """Whether a device of so many bytes runs it, with what a CUDA process needs beside its tensors."""
        return self.peak_allocated_bytes + (RUNTIME_BYTES if device == "cuda" else 0) <= device_memory


def predict(schedule: str, plan: Plan) -> Prediction:
    """The peak of ``schedule`` for ``plan``."""
    held = make_schedule(schedule).cost(plan)
    moments = [{name: moment.get(name, 0) for name in COMPONENTS} for moment in (*held.moments, held.steady)]
    at_peak, steady = max(moments, key=lambda moment: sum(moment.values())), moments[-1]
    peak_bytes, steady_bytes = sum(at_peak.values()), sum(steady.values())
    return Prediction(
        schedule=schedule,
        peak_allocated_bytes=peak_bytes,
        steady_bytes=steady_bytes,
        transient_bytes=peak_bytes - steady_bytes,
        components={name: max(moment[name] for moment in moments) for name in COMPONENTS},
        at_peak=at_peak,
        host_bytes=held.host_bytes,
    )


def longest_prompt(schedule: str, plan: Plan, device_memory: int) -> int:
    """The longest prompt, in steps of 256 tokens, whose peak fits; 0 if none does. Memory only: no model's window."""

    def fits(steps: int) -> bool:
        return predict(schedule, _at_length(plan, steps * PROMPT_STEP)).fits(device_memory, plan.device)

    low, high = 0, PROMPT_LIMIT // PROMPT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * PROMPT_STEP


def _at_length(plan: Plan, length: int) -> Plan:
    return replace(plan, prompt_length=length)


def recommend_chunk_size(schedule: str, plan: Plan, device_memory: int) -> int:
    """The largest chunk whose activations stay below the terms that no chunk size can change, and that fits.

    Larger chunks are faster, but beyond active KV, bridge and retained caches (or a twentieth of the peak, for
    schedules that have none of these) they would decide it.
    """
    for chunk_size in CHUNK_SIZES:
        candidate = replace(plan, config=plan.config.replace(chunk_size=chunk_size))
        prediction = predict(schedule, candidate)
        parts = prediction.components
        fixed = parts["active_kv"] + parts["bridge"] + parts["compressed_cache"]
        small = max(fixed, prediction.peak_allocated_bytes // 20)
        if parts["activations"] <= small and prediction.fits(device_memory, plan.device):
            return chunk_size
    return CHUNK_SIZES[-1]


def choose_chunk_size(
    shape: ModelShape, prompt_length: int, config: PrefillConfig, device: Device, reserve: int = 0
) -> int:
    """What ``chunk_size="auto"`` means for this prompt and ``reserve`` tokens more, with what is free now."""
    kind = _kind(device)
    # The weights are loaded and the context is there: both are part of what such a device would have.
    memory = _free(device) + shape.weight_bytes + (RUNTIME_BYTES if kind == "cuda" else 0)
    start = Plan(shape, prompt_length, config.replace(chunk_size=CHUNK_SIZES[-1]), device=kind, reserve=reserve)
    return recommend_chunk_size(config.schedule, start, memory)


def require_memory(
    shape: ModelShape, prompt_length: int, config: PrefillConfig, device: Device, reserve: int = 0
) -> Prediction:
    """The engine's question before it allocates: does it fit what is free now? ``chunk_size`` must be a number.

    Raises:
        MemoryLimitError: it does not; the message has the planner's numbers.
    """
    plan = Plan(shape, prompt_length, config, device=_kind(device), reserve=reserve)
    prediction = predict(config.schedule, plan)
    needed, free = prediction.peak_allocated_bytes - shape.weight_bytes, _free(device)
    if needed > free:
        raise MemoryLimitError(_refusal(prediction, plan, needed, free))
    return prediction


def _kind(device: Device) -> str:
    first = device[0] if isinstance(device, Sequence) and not isinstance(device, str) else device
    return "cuda" if str(first).split(":")[0] == "cuda" else "cpu"


def _free(device: Device) -> int:
    """Bytes that a request could take; of a model that is spread over several devices, all of them together."""
    return available_bytes(device) + reusable_bytes(device)


def _refusal(prediction: Prediction, plan: Plan, needed: int, free: int) -> str:
    largest = [name for name in COMPONENTS if name != "weights" and prediction.components[name]]
    largest.sort(key=lambda name: -prediction.components[name])
    parts = ", ".join(f"{name} {format_bytes(prediction.components[name])}" for name in largest[:3])
    return (
        f"{prediction.schedule} needs {format_bytes(needed)} for {plan.prompt_length:,} tokens beside the weights "
        f"({parts}), but {format_bytes(free)} are free on {plan.device}; shorten the prompt, lower chunk_size="
        f"{plan.config.chunk_size} or kept_tokens={plan.config.kept_tokens}"
    )


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of ``tidekv plan``."""

    prediction: Prediction
    fits: bool | None
    longest_prompt: int | None
    recommended_chunk_size: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON types; ``fits`` and ``longest_prompt`` are null without a device memory."""
        return {
            "schedule": self.prediction.schedule,
            "peak_allocated_bytes": self.prediction.peak_allocated_bytes,
            "steady_bytes": self.prediction.steady_bytes,
            "transient_bytes": self.prediction.transient_bytes,
            "host_bytes": self.prediction.host_bytes,
            "components": dict(self.prediction.components),
            "components_at_peak": dict(self.prediction.at_peak),
            "fits": self.fits,
            "longest_prompt": self.longest_prompt,
            "recommended_chunk_size": self.recommended_chunk_size,
        }


def plan_table(plan: Plan, device_memory: int | None, schedules: tuple[str, ...] = SCHEDULES) -> list[PlanRow]:
    """Every schedule's prediction, whether it fits, the longest prompt that does, and the chunk size to take.

    ``chunk_size="auto"`` in the plan's config stands for each schedule's recommended one.
    """
    return list(_plan_rows(plan, device_memory, schedules))


def _plan_rows(plan: Plan, device_memory: int | None, schedules: tuple[str, ...]) -> Iterator[PlanRow]:
    auto = plan.config.chunk_size == AUTO_CHUNK
    for schedule in schedules:
        fixed = replace(plan, config=plan.config.replace(chunk_size=CHUNK_SIZES[-1])) if auto else plan
        chunk = recommend_chunk_size(schedule, fixed, device_memory if device_memory is not None else 2**63)
        own = replace(plan, config=plan.config.replace(chunk_size=chunk)) if auto else plan
        prediction = predict(schedule, own)
        yield PlanRow(
            prediction=prediction,
            fits=None if device_memory is None else prediction.fits(device_memory, plan.device),
            longest_prompt=None if device_memory is None else longest_prompt(schedule, own, device_memory),
            recommended_chunk_size=chunk if make_schedule(schedule).takes_chunk_size else None,
        )
