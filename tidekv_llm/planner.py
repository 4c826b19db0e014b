"""The planner: memory of a construction from the model's dimensions alone (paper, Eqs. 1 and 9).

A schedule's peak is the highest of a few moments, and each moment is a sum of components: the retained caches so
far, the active layer's full KV, the hidden bridge, one step's activations, and scratch. The activation term is
not a fitted ``c * C * d_ff``: it is the list of tensors that a dense decoder layer of transformers holds together
(:class:`LayerStep`), which gives c = 3 for the gated MLP and says what else lives beside it.

Beyond the model: the CUDA context and what the allocator keeps in reserve (:data:`RUNTIME_BYTES`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

from tidekv_llm import attention
from tidekv_llm.config import AUTO_CHUNK, PrefillConfig
from tidekv_llm.errors import MemoryLimitError
from tidekv_llm.memory import available_bytes, reusable_bytes
from tidekv_llm.shapes import ModelShape
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    import torch

CHUNK_SIZES = (2048, 1024, 512, 256, 128)
KEYDIFF_BLOCK = 128
# No device has less; a number without a unit means bytes.
LEAST_MEMORY = 2**20
# Schedules that no chunk_size changes: they take the prompt whole, or have a step of their own.
WHOLE_PROMPT = ("post-prefill", "one-shot", "kivi", "keydiff-online")
# What a CUDA process holds beside its tensors: context, kernels, the allocator's reserve. The paper's A100 figures
# (64K, NVML minus peak allocated: 17.283 - 16.639) give 0.64 GiB for TideKV; a CPU process has no such thing.
RUNTIME_BYTES = int(0.64 * 2**30)
FLOAT32 = 4
INT64 = 8
INT32 = 4
# transformers' RMSNorm holds two float32 tensors together: the upcast input and its square, then its scaled copy.
NORM_COPIES = 2
# Searching the longest prompt: in steps of this many tokens, up to the largest window of any model today.
PROMPT_STEP, PROMPT_LIMIT = 256, 16 * 2**20

Components = dict[str, int]
# One device, or all that a model is spread over.
Device = Union["torch.device", str, Sequence["torch.device"]]
COMPONENTS = ("weights", "compressed_cache", "active_kv", "bridge", "activations", "temporary", "bookkeeping")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to predict for.

    Attributes:
        shape: the model.
        prompt_length: S.
        config: chunk size (a number here), budget, window, bridge.
        batch: B.
        device: ``"cuda"`` or ``"cpu"``; host memory counts on a CPU, scratch tiles are the CPU backend's.
        reserve: slots for decoded tokens.
    """

    shape: ModelShape
    prompt_length: int
    config: PrefillConfig
    batch: int = 1
    device: str = "cuda"
    reserve: int = 0

    @property
    def chunk_size(self) -> int:
        """C, at most the prompt."""
        assert self.config.chunk_size != AUTO_CHUNK
        return min(int(self.config.chunk_size), self.prompt_length)

    @property
    def tiled(self) -> bool:
        """Whether attention works on tiles in scratch buffers (CPU) or inside a fused kernel (CUDA)."""
        return self.device == "cpu"

    def kv_bytes(self, positions: int) -> int:
        """Keys and values of one layer: 2 * B * Hkv * positions * D * b."""
        return self.batch * self.shape.kv_bytes(positions)

    def kept(self, layer: int) -> int:
        """Positions that layer keeps: its window if it has one, else the budget."""
        window = self.shape.window(layer)
        return min(self.config.kept_tokens if window is None else window, self.prompt_length)

    def caches(self, layers: int, positions: Callable[[int], int]) -> int:
        """Bytes of the first ``layers`` layers' storage."""
        return sum(self.stored_bytes(layer, positions(layer)) for layer in range(layers))

    def stored_bytes(self, layer: int, positions: int) -> int:
        """One layer's storage: all in full precision, or ``kv_bits`` but for the newest ``kv_residual``.

        Quantised, every 64 numbers share a float32 scale and zero (:mod:`tidekv_llm.cache.rows`).
        """
        bits = self.config.kv_bits
        if bits >= 16 or self.shape.window(layer) is not None:
            return self.kv_bytes(positions + self.reserve)
        full = min(self.config.kv_residual, positions)
        numbers = 2 * self.batch * self.shape.num_kv_heads * self.shape.head_dim * (positions - full)
        return numbers * bits // 8 + numbers * 2 * FLOAT32 // 64 + self.kv_bytes(full + self.reserve)

    def position_bytes(self, layers: int, positions: Callable[[int], int], size: int = INT32) -> int:
        """Bytes of the kept positions, int32 per KV head and slot."""
        return self.batch * self.shape.num_kv_heads * size * sum(positions(layer) for layer in range(layers))

    @property
    def evidence_bytes(self) -> int:
        """Float32 evidence per prompt position, in host memory."""
        return self.prompt_length * FLOAT32 if self.device == "cpu" else 0


@dataclass(frozen=True, slots=True)
class LayerStep:
    """Tensors of one decoder layer over C tokens, as transformers' dense gated layers hold them.

    Attributes:
        plan: dimensions.
        tokens: C.
        mlp_tokens: tokens the MLP sees at a time; C, or less when it is split.
        history: positions the attention looks back on.
        own_input: the layer's input is a tensor of its own (chunk-major), not a slot of the bridge.
        repeats_kv: keys and values are repeated for every query head (transformers' SDPA on a CPU).
        window_only: only keys and values are computed (the last layer before the observation window).
        heads_at_once: KV heads that are attended to together, 0 for all.
        scores: the attention also gives the log-sum-exp of the observation window.
    """

    plan: Plan
    tokens: int
    mlp_tokens: int
    history: int
    own_input: bool = False
    repeats_kv: bool = False
    window_only: bool = False
    heads_at_once: int = 0
    scores: bool = False

    def activation_bytes(self) -> int:
        """The largest of the moments in one layer's forward."""
        if self.window_only:
            return self._resident + max(self._norm(), self._rotary())
        return self._resident + max(self._norm(), self._rotary(), self._attend(), self._second_norm(), self._mlp())

    @property
    def _width(self) -> tuple[int, int, int]:
        """Bytes per token of hidden states, queries, and keys."""
        shape = self.plan.shape
        b = shape.element_bytes
        return (
            shape.hidden_size * b,
            shape.num_heads * shape.head_dim * b,
            shape.num_kv_heads * shape.head_dim * b,
        )

    def _rows(self, per_token: int, tokens: int | None = None) -> int:
        return self.plan.batch * (self.tokens if tokens is None else tokens) * per_token

    @property
    def _resident(self) -> int:
        """Rotary tables and positions, and the input if it is nobody else's."""
        shape = self.plan.shape
        tables = 2 * self.tokens * shape.head_dim * shape.element_bytes + self.tokens * INT64
        return tables + (self._rows(self._width[0]) if self.own_input else 0)

    def _norm(self) -> int:
        return self._rows(NORM_COPIES * FLOAT32 * self.plan.shape.hidden_size)

    def _rotary(self) -> int:
        """Normed input, q, k, v, and q * cos, the rotated half, its product with sin, then the same for k."""
        hidden, query, key = self._width
        return self._rows(hidden + query + 2 * key + max(3 * query, query + 3 * key))

    def _attend(self) -> int:
        """Normed input, q, the attention's output (in scratch when tiled) and its projection."""
        hidden, query, _ = self._width
        shape = self.plan.shape
        # One output for all head groups, beside the scratch that each of them uses.
        in_scratch = self.plan.tiled and not self.repeats_kv and not self.heads_at_once
        output = 0 if in_scratch else query + FLOAT32 * shape.num_heads
        repeated = 2 * query if self.repeats_kv else 0
        return self._rows(hidden + query + output) + max(self._rows(hidden), self._rows(repeated), self._window_lse())

    def _window_lse(self) -> int:
        """The tiled backend's float32 copy of the observation window's scores, one KV head's group at a time."""
        shape = self.plan.shape
        if not self.scores or not self.plan.tiled or shape.element_bytes == FLOAT32:
            return 0
        rows = min(self.plan.config.window_size, self.tokens, self._tile_rows())
        return shape.num_heads // shape.num_kv_heads * rows * self.history * FLOAT32

    def _tile_rows(self) -> int:
        """Queries per tile."""
        shape = self.plan.shape
        group = shape.num_heads // shape.num_kv_heads
        backend = attention.TiledAttention(attention.TILE_BYTES)
        return backend.tile_queries(group, self.history, self.tokens, shape.element_bytes)

    def _second_norm(self) -> int:
        return self._rows(self._width[0]) + self._norm()

    def _mlp(self) -> int:
        """Residual and normed input; activated gate, up and their product (c = 3 in Eq. 9)."""
        hidden, shape = self._width[0], self.plan.shape
        inner = self._rows(3 * shape.intermediate_size * shape.element_bytes, self.mlp_tokens)
        output = hidden if self.mlp_tokens < self.tokens else 0
        return self._rows(2 * hidden + output) + inner

    def scratch_bytes(self) -> int:
        """The tiled backend's buffers: its output, one tile of scores, and the tile's queries and output."""
        if not self.plan.tiled or self.repeats_kv:
            return 0
        shape = self.plan.shape
        group = shape.num_heads // shape.num_kv_heads
        heads = self.heads_at_once * group or shape.num_heads
        output = self._rows(heads * shape.head_dim * shape.element_bytes)
        rows = group * self._tile_rows()
        scores = max(attention.TILE_BYTES, rows * self.history * shape.element_bytes)
        return output + scores + 2 * rows * shape.head_dim * shape.element_bytes


def scoring_bytes(plan: Plan, block_size: int, kept: int, length: int) -> int:
    """Workspace of Algorithm 2, O(Hq * (W * b_s + K)): a block of float32 logits, or the streaming top-k."""
    if kept >= length:
        return plan.batch * plan.shape.num_kv_heads * kept * INT64
    shape, config = plan.shape, plan.config
    block = min(block_size, length)
    copies = FLOAT32 + (shape.element_bytes if shape.element_bytes != FLOAT32 else 0)
    logits = shape.num_heads * min(config.window_size, length) * block * copies
    # Packed keys of best and block together, top-k values and indices, and the block's pooled scores with indices.
    top_k = shape.num_kv_heads * (3 * INT64 * (kept + block) + block * (INT64 + 2 * FLOAT32))
    return plan.batch * max(logits + shape.num_kv_heads * kept * INT64, top_k)


# --- the schedules --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moments:
    """What a schedule holds: components at its critical moments, what stays, and what lies in host memory."""

    moments: tuple[Components, ...]
    steady: Components
    host_bytes: int = 0


def _layer_major(
    plan: Plan,
    chunk: int,
    mlp_chunk: int,
    *,
    block: int | None = None,
    keeps: Callable[[int], int] | None = None,
    on_host: bool = False,
    cache_bytes: Callable[[int], int] | None = None,
    layer_end_bytes: int | None = None,
) -> Moments:
    """One active layer at a time: the last full step of layer N - 2, the last layer's keys, and its layer end."""
    shape, length, layers = plan.shape, plan.prompt_length, plan.shape.num_layers
    keeps = keeps or plan.kept
    on_host = on_host and plan.device != "cpu"  # a CPU's host memory is its device memory
    stored = cache_bytes or (lambda count: plan.caches(count, keeps))
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
            "compressed_cache": 0 if on_host else stored(count),
            "activations": activations,
            "temporary": scratch + extra,
            "bookkeeping": plan.evidence_bytes + plan.position_bytes(count, keeps),
        }

    steady = {
        "weights": shape.weight_bytes,
        "compressed_cache": 0 if on_host else stored(layers),
        "bookkeeping": plan.evidence_bytes + plan.position_bytes(layers, keeps),
    }
    moments = (
        moment(max(0, layers - 2), step.activation_bytes(), 0) if layers > 1 else moment(0, 0, 0),
        moment(layers - 1, max(tail.activation_bytes(), last.activation_bytes()), 0),
        moment(layers, 0, temporary),
    )
    host = (stored(layers) if on_host else 0) + (hidden if far else 0)
    return Moments(moments, steady, host)


def _chunk_major(
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


def _tidekv(plan: Plan) -> Moments:
    return _layer_major(plan, plan.chunk_size, plan.config.mlp_chunk_size)


def _all(plan: Plan) -> Callable[[int], int]:
    return lambda layer: plan.prompt_length


def _no_evict(plan: Plan) -> Moments:
    return _layer_major(plan, plan.chunk_size, plan.config.mlp_chunk_size, keeps=_all(plan), layer_end_bytes=0)


def _post_prefill(plan: Plan) -> Moments:
    return _layer_major(plan, plan.prompt_length, plan.config.mlp_chunk_size, block=plan.prompt_length)


def _mini_sequence(plan: Plan) -> Moments:
    split = plan.config.mlp_chunk_size or plan.chunk_size
    return _layer_major(plan, plan.prompt_length, split, keeps=_all(plan), layer_end_bytes=0, on_host=True)


def _kivi(plan: Plan) -> Moments:
    length = plan.prompt_length
    own = replace(plan, config=plan.config.replace(kv_bits=2, kv_residual=128))
    # The gathered layer is there until it is packed; one head at a time is copied to float32, shifted and scaled.
    head = length * plan.shape.head_dim * 3 * FLOAT32
    end = own.kv_bytes(length) + 2 * head
    return _layer_major(own, length, plan.config.mlp_chunk_size, keeps=_all(own), layer_end_bytes=end)


def _one_shot(plan: Plan) -> Moments:
    """Transformers' own forward: embeddings, the layer's input and all layers' KV are alive together."""
    shape, length, layers = plan.shape, plan.prompt_length, plan.shape.num_layers
    hidden = plan.batch * length * shape.hidden_size * shape.element_bytes
    step = LayerStep(plan, length, length, length, repeats_kv=plan.tiled and shape.num_kv_heads < shape.num_heads)
    steady = {
        "weights": shape.weight_bytes,
        "compressed_cache": plan.caches(layers, _all(plan)),
        "bookkeeping": plan.evidence_bytes,
    }
    return Moments(({**steady, "bridge": 2 * hidden, "activations": step.activation_bytes()},), steady)


def _chunked(plan: Plan) -> Moments:
    return _chunk_major(plan, plan.chunk_size, slots=_all(plan))


def _headinfer(plan: Plan) -> Moments:
    return _chunk_major(plan, plan.chunk_size, slots=_all(plan), on_host=True, heads_at_once=1)


def _online(plan: Plan, chunk: int, scores: int) -> Moments:
    """Budget plus one chunk of slots per layer; an eviction copies one of keys or values aside."""
    kept = min(plan.config.kept_tokens, plan.prompt_length)
    slots = min(kept + chunk, plan.prompt_length) if kept < plan.prompt_length else plan.prompt_length
    aside = plan.kv_bytes(kept) // 2 + plan.batch * plan.shape.num_kv_heads * kept * INT64
    evict = max(aside, scores) if slots > kept else 0
    return _chunk_major(plan, chunk, slots=lambda layer: slots, evict_bytes=evict, slot_positions=INT64)


def _block(plan: Plan) -> Moments:
    history = plan.config.kept_tokens + plan.chunk_size
    scores = scoring_bytes(plan, plan.config.score_block_size, plan.config.kept_tokens, history)
    return _online(plan, plan.chunk_size, scores)


def _keydiff(plan: Plan) -> Moments:
    chunk = min(KEYDIFF_BLOCK, plan.prompt_length)
    # float32 keys, their norms' quotient, and the product with the mean direction.
    keys = plan.kv_bytes(plan.config.kept_tokens + chunk) // 2 // plan.shape.element_bytes
    return _online(plan, chunk, 2 * FLOAT32 * keys)


SCHEDULES: dict[str, Callable[[Plan], Moments]] = {
    "tidekv": _tidekv,
    "tidekv-no-evict": _no_evict,
    "post-prefill": _post_prefill,
    "one-shot": _one_shot,
    "chunked": _chunked,
    "block-snapkv": _block,
    "block-recent": _block,
    "keydiff-online": _keydiff,
    "kivi": _kivi,
    "headinfer": _headinfer,
    "mini-sequence": _mini_sequence,
}


# --- predictions ----------------------------------------------------------------------------------------


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
    held = SCHEDULES[schedule](plan)
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


def choose_chunk_size(shape: ModelShape, prompt_length: int, config: PrefillConfig, device: Device) -> int:
    """What ``chunk_size="auto"`` means for this prompt, with what is free on the device now."""
    kind = _kind(device)
    # The weights are loaded and the context is there: both are part of what such a device would have.
    memory = _free(device) + shape.weight_bytes + (RUNTIME_BYTES if kind == "cuda" else 0)
    start = Plan(shape, prompt_length, config.replace(chunk_size=CHUNK_SIZES[-1]), device=kind)
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


def plan_table(plan: Plan, device_memory: int | None, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> list[PlanRow]:
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
            recommended_chunk_size=None if schedule in WHOLE_PROMPT else chunk,
        )
