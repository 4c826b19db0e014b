"""The two orders of construction, layer-major and chunk-major: what is alive at their critical moments."""

from __future__ import annotations

from tidekv_llm.costs.layer_step import LayerStep, scoring_bytes
from tidekv_llm.costs.plan import INT32, Components, Moments, Plan, Positions


def layer_major(
    plan: Plan,
    chunk: int,
    mlp_chunk: int,
    *,
    block: int | None = None,
    keeps: Positions | None = None,
    on_host: bool = False,
    layer_end_bytes: int | None = None,
) -> Moments:
    """One active layer at a time: the last full step of layer N - 2, the last layer's keys, and its layer end.

    Args:
        plan: dimensions.
        chunk: tokens per step.
        mlp_chunk: tokens per call of the MLP, 0 for the chunk.
        block: keys scored at once, default ``score_block_size``.
        keeps: positions that each layer keeps, default its budget or window.
        on_host: the cache lies in host memory.
        layer_end_bytes: workspace of a layer end, default that of the scoring.
    """
    length, layers, keeps = plan.prompt_length, plan.shape.num_layers, keeps or plan.kept
    if layer_end_bytes is None:
        kept = min(keeps(layers - 1), length)
        layer_end_bytes = scoring_bytes(plan, block or plan.config.score_block_size, kept, length)
    step = LayerStep(plan, chunk, min(mlp_chunk or chunk, chunk), length, scores=True)
    base = {
        "ready_layer": plan.shape.ready_bytes,
        "active_kv": plan.kv_bytes(length),
        "bridge": _near_bridge(plan, chunk),
    }

    def moment(done: int, activations: int, layer_end: int = 0) -> Components:
        held = plan.held(done, keeps, on_host=on_host)
        return {**held, **base, "activations": activations, "temporary": step.scratch_bytes() + layer_end}

    last_full = moment(layers - 2, step.activation_bytes()) if layers > 1 else moment(0, 0)
    moments = (last_full, moment(layers - 1, _last_layer(plan, chunk)), moment(layers, 0, layer_end_bytes))
    host = plan.caches(layers, keeps) if plan.apart(on_host) else 0
    if plan.apart(plan.config.bridge == "host"):
        host += plan.hidden_bytes(length)
    return Moments(moments, plan.held(layers, keeps, on_host=on_host), host)


def _near_bridge(plan: Plan, chunk: int) -> int:
    """The bridge on the device; of one on the host two inputs, one on its way, and an output on its way back."""
    hidden = plan.hidden_bytes(plan.prompt_length)
    return min(3 * plan.hidden_bytes(chunk), hidden) if plan.apart(plan.config.bridge == "host") else hidden


def _last_layer(plan: Plan, chunk: int) -> int:
    """Activations where only keys and values are computed, or the observation window's outputs."""
    window = min(plan.config.window_size, plan.prompt_length)
    keys_only = LayerStep(plan, chunk, chunk, plan.prompt_length, window_only=True)
    outputs = LayerStep(plan, window, window, plan.prompt_length, scores=True)
    return max(keys_only.activation_bytes(), outputs.activation_bytes())


def chunk_major(
    plan: Plan,
    chunk: int,
    *,
    slots: Positions,
    evict_bytes: int = 0,
    on_host: bool = False,
    heads_at_once: int = 0,
    position_size: int = INT32,
) -> Moments:
    """Every layer's storage is there from the first chunk on; the last chunk sees the longest history.

    Args:
        plan: dimensions.
        chunk: tokens per step.
        slots: positions that each layer has room for.
        evict_bytes: workspace of an eviction between two chunks.
        on_host: the cache lies in host memory.
        heads_at_once: KV heads that are attended to together, 0 for all.
        position_size: bytes of a kept position.
    """
    shape, longest = plan.shape, max(slots(layer) for layer in range(plan.shape.num_layers))
    mlp_chunk = min(plan.config.mlp_chunk_size or chunk, chunk)
    step = LayerStep(plan, chunk, mlp_chunk, longest, own_input=True, heads_at_once=heads_at_once)
    activations, scratch = step.activation_bytes(), step.scratch_bytes()
    if heads_at_once and plan.apart(on_host):  # the group's keys and values on the device
        activations += plan.kv_bytes(longest) * heads_at_once // shape.num_kv_heads
    held = plan.held(shape.num_layers, slots, on_host=on_host, position_size=position_size)
    working = {**held, "ready_layer": shape.ready_bytes}
    moments = (
        {**working, "activations": activations, "temporary": scratch},
        {**working, "activations": 2 * plan.hidden_bytes(chunk), "temporary": scratch + evict_bytes},
    )
    return Moments(moments, held, plan.caches(shape.num_layers, slots) if plan.apart(on_host) else 0)
