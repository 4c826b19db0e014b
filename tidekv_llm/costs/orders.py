"""The two orders of construction, layer-major and chunk-major: what is alive at their critical moments."""

from __future__ import annotations

from collections.abc import Callable

from tidekv_llm.costs.layer_step import LayerStep, scoring_bytes
from tidekv_llm.costs.plan import INT32, Components, Moments, Plan


def layer_major(
    plan: Plan,
    chunk: int,
    mlp_chunk: int,
    *,
    block: int | None = None,
    keeps: Callable[[int], int] | None = None,
    on_host: bool = False,
    layer_end_bytes: int | None = None,
) -> Moments:
    """One active layer at a time: the last full step of layer N - 2, the last layer's keys, and its layer end."""
    shape, length, layers = plan.shape, plan.prompt_length, plan.shape.num_layers
    keeps = keeps or plan.kept
    on_host = on_host and plan.device != "cpu"  # a CPU's host memory is its device memory
    hidden = plan.batch * length * shape.hidden_size * shape.element_bytes
    far = plan.config.bridge == "host" and plan.device != "cpu"
    # From the host: two inputs, one of them on its way, and an output on its way back.
    near_bridge = min(3 * hidden * chunk // length, hidden) if far else hidden
    step = LayerStep(plan, chunk, min(mlp_chunk or chunk, chunk), length, scores=True)
    tail = LayerStep(plan, chunk, chunk, length, window_only=True)
    window = min(plan.config.window_size, length)
    last = LayerStep(plan, window, window, length, scores=True)
    block = block or plan.config.score_block_size
    temporary = layer_end_bytes
    if temporary is None:
        temporary = scoring_bytes(plan, block, min(keeps(layers - 1), length), length)
    base = {"active_kv": plan.kv_bytes(length), "bridge": near_bridge}
    scratch = step.scratch_bytes()

    def moment(count: int, activations: int, extra: int) -> Components:
        return {
            **base,
            "weights": shape.weight_bytes,
            "compressed_cache": 0 if on_host else plan.caches(count, keeps),
            "activations": activations,
            "temporary": scratch + extra,
            "bookkeeping": plan.evidence_bytes + plan.position_bytes(count, keeps),
        }

    steady = {
        "weights": shape.weight_bytes,
        "compressed_cache": 0 if on_host else plan.caches(layers, keeps),
        "bookkeeping": plan.evidence_bytes + plan.position_bytes(layers, keeps),
    }
    moments = (
        moment(max(0, layers - 2), step.activation_bytes(), 0) if layers > 1 else moment(0, 0, 0),
        moment(layers - 1, max(tail.activation_bytes(), last.activation_bytes()), 0),
        moment(layers, 0, temporary),
    )
    host = (plan.caches(layers, keeps) if on_host else 0) + (hidden if far else 0)
    return Moments(moments, steady, host)


def chunk_major(
    plan: Plan,
    chunk: int,
    *,
    slots: Callable[[int], int],
    evict_bytes: int = 0,
    on_host: bool = False,
    heads_at_once: int = 0,
    slot_positions: int = 0,
) -> Moments:
    """Every layer's storage is there from the first chunk on; the last chunk sees the longest history."""
    shape, layers = plan.shape, plan.shape.num_layers
    longest = max(slots(layer) for layer in range(layers))
    step = LayerStep(
        plan, chunk, min(plan.config.mlp_chunk_size or chunk, chunk), longest,
        own_input=True, heads_at_once=heads_at_once,
    )  # fmt: skip
    activations = step.activation_bytes()
    on_host = on_host and plan.device != "cpu"  # a CPU's host memory is its device memory
    if heads_at_once and on_host:  # the group's keys and values on the device
        activations += plan.kv_bytes(longest) * heads_at_once // shape.num_kv_heads
    stored = plan.caches(layers, slots)
    common = {
        "weights": shape.weight_bytes,
        "compressed_cache": 0 if on_host else stored,
        "bookkeeping": plan.evidence_bytes + plan.position_bytes(layers, slots, slot_positions or INT32),
    }
    moments = (
        {**common, "activations": activations, "temporary": step.scratch_bytes()},
        {**common, "activations": 2 * plan.batch * chunk * shape.hidden_size * shape.element_bytes,
         "temporary": step.scratch_bytes() + evict_bytes},
    )  # fmt: skip
    return Moments(moments, common, stored if on_host else 0)
