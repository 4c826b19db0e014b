"""What a plain decoder layer consists of, read off its modules: enough to compute it without calling it.

Most families differ in where their norms stand, in whether queries and keys are normed, and in how positions rotate
them. These are data here: names of norms are looked up in :data:`NORMS`, and how a layer rotates is found out by
letting it run once and comparing (:func:`_rotation_of`). A layer that is put together in another way is not plain;
whoever uses this compares the outcome with the model's own (:mod:`tidekv_llm.selfcheck`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tidekv_llm.attention import AttentionParams
from tidekv_llm.hf import Decoder
from tidekv_llm.products import Product

Map = Callable[[Tensor], Tensor]
"""Of hidden states, whatever their leading dimensions."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rotated queries [T, Hq, D], keys and values [T, Hkv, D] of new tokens to attention output [T, Hq * Dv]."""

# Names of a layer's norms -> those before the attention, after it, before the MLP and after it. None: there is none.
NORMS: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset(name for name in roles if name): roles
    for roles in (
        ("input_layernorm", None, "post_attention_layernorm", None),  # Llama, Mistral, Qwen, Phi-3, Granite, SmolLM3
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),  # Gemma 2 and 3
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2, EXAONE 4
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
        ("input_layernorm", None, None, None),  # Cohere: one norm for both, side by side
    )
}
# Relative error up to which a probe counts as the same arithmetic.
_SAME = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
_PROBE_POSITIONS = (3, 1000)


class NotPlainError(Exception):
    """A layer has parts that are not known here; the message says which."""


@dataclass(frozen=True)
class Rotation:
    """How positions rotate queries and keys: ``x * cos + x[..., order] * sin``.

    Attributes:
        order: int64 [D], what each channel is rotated with.
        sign: [D], -1 where it comes with a minus.
        columns: int64 [R], the family's table column that each of the first R channels takes.
    """

    order: Tensor
    sign: Tensor
    columns: Tensor

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The family's tables of T positions as [T, 1, D] each, signs included; channels beyond R keep their value."""
        cos, sin = cos.index_select(1, self.columns), sin.index_select(1, self.columns)
        rest = self.order.shape[0] - len(self.columns)
        cos, sin = functional.pad(cos, (0, rest), value=1.0), functional.pad(sin, (0, rest))
        return cos[:, None], (sin * self.sign)[:, None]

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [T, H, D]; some families' tables are float32 whatever the heads are."""
        return torch.addcmul(heads * cos, heads.index_select(-1, self.order), sin).to(heads.dtype)


@dataclass(frozen=True)
class PlainLayer:
    """One decoder layer as arithmetic.

    Attributes:
        heads: query heads, Hq.
        kv_heads: Hkv.
        before_attention, after_attention, before_mlp, after_mlp: norms; None where there is none.
        qkv: queries, keys and values of [T, d_model].
        query_norm, key_norm: norms of heads [T, H, D], or None.
        rotation: how positions enter, None for a layer without them.
        out: the attention's output projection.
        mlp: of [T, d_model].
        parallel: attention and MLP see the same norm's output and are added together.
        residual: factor on what is added to the residual stream.
        params: scaling, window, softcap and sinks of its attention.
    """

    heads: int
    kv_heads: int
    before_attention: Map | None
    after_attention: Map | None
    before_mlp: Map | None
    after_mlp: Map | None
    qkv: Map
    query_norm: Map | None
    key_norm: Map | None
    rotation: Rotation | None
    out: Map
    mlp: Map
    parallel: bool
    residual: float
    params: AttentionParams

    def __call__(self, hidden: Tensor, tables: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
        """Hidden states [T, d_model] of new tokens to the same of the next layer.

        ``tables`` are of the tokens' positions (:meth:`Rotation.tables`).
        """
        normed = _through(self.before_attention, hidden)
        mixed = _through(self.after_attention, self.out(attend(*self.project(normed, tables))))
        if self.parallel:
            return hidden + mixed + self.mlp(normed)
        hidden = torch.add(hidden, mixed, alpha=self.residual)
        expanded = _through(self.after_mlp, self.mlp(_through(self.before_mlp, hidden)))
        return torch.add(hidden, expanded, alpha=self.residual)

    def project(self, normed: Tensor, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D] of what enters the attention."""
        parts = self.qkv(normed).view(normed.shape[0], self.heads + 2 * self.kv_heads, -1)
        turned, values = parts[:, : self.heads + self.kv_heads], parts[:, self.heads + self.kv_heads :]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = turned[:, : self.heads], turned[:, self.heads :]
            turned = torch.cat((self.query_norm(queries), self.key_norm(keys)), dim=1)
        if self.rotation is not None and tables is not None:
            turned = self.rotation(turned, *tables)
        return turned[:, : self.heads], turned[:, self.heads :], values


def _through(norm: Map | None, hidden: Tensor) -> Tensor:
    return hidden if norm is None else norm(hidden)


# --- reading a model -----------------------------------------------------------------------------------


@torch.no_grad()
def plain_layers(decoder: Decoder, alone: Callable[[], bool]) -> tuple[PlainLayer, ...]:
    """Every layer of a model as arithmetic.

    Args:
        decoder: the model.
        alone: whether nothing else computes in this process (:class:`~tidekv_llm.products.Product`).

    Raises:
        NotPlainError: a layer has parts that are not known here, or its weights are brought to a device by hooks.
    """
    if decoder.rope_depends_on_length:
        raise NotPlainError("its rotary tables depend on the length so far")
    if len(decoder.devices) > 1 or any(hasattr(module, "_hf_hook") for module in decoder.model.modules()):
        raise NotPlainError("its layers lie on several devices or are fetched to one")
    return tuple(_read(decoder, index, alone) for index in range(decoder.num_layers))


def _read(decoder: Decoder, index: int, alone: Callable[[], bool]) -> PlainLayer:
    layer: Any = decoder.layers[index]
    parts = {name for name, part in layer.named_children() if not isinstance(part, (nn.Dropout, nn.Identity))}
    roles = NORMS.get(frozenset(parts - {"self_attn", "mlp"}))
    if roles is None or not {"self_attn", "mlp"} <= parts:
        raise NotPlainError(f"{type(layer).__name__} consists of {', '.join(sorted(parts))}")
    attention = layer.self_attn
    before, after, before_mlp, after_mlp = (None if name is None else _norm(getattr(layer, name)) for name in roles)
    probe = _Probe(decoder, index)
    bare = PlainLayer(
        heads=decoder.num_heads,
        kv_heads=decoder.num_kv_heads,
        before_attention=before,
        after_attention=after,
        before_mlp=before_mlp,
        after_mlp=after_mlp,
        qkv=Product(_named(attention, ("qkv_proj",), ("q_proj", "k_proj", "v_proj")), alone),
        query_norm=_head_norm(getattr(attention, "q_norm", None), decoder.head_dim),
        key_norm=_head_norm(getattr(attention, "k_norm", None), decoder.head_dim),
        rotation=None,
        out=Product(_named(attention, ("o_proj",)), alone),
        mlp=_mlp(layer.mlp, alone),
        parallel=before_mlp is None and after_mlp is None,
        residual=float(getattr(layer, "residual_multiplier", 1.0)),
        params=probe.params,
    )
    return probe.with_rotation(bare)


def _named(module: Any, *choices: tuple[str, ...]) -> list[nn.Module]:
    """The submodules of the first choice of names that are all there."""
    for names in choices:
        if all(hasattr(module, name) for name in names):
            return [getattr(module, name) for name in names]
    raise NotPlainError(f"{type(module).__name__} has no {' or '.join(choices[-1])}")


def _mlp(mlp: Any, alone: Callable[[], bool]) -> Map:
    """A gated MLP's products; any other kind, experts say, is called as it is with a batch of one."""
    parts = dict(mlp.named_children())
    activation = parts.get("act_fn", parts.get("activation_fn"))
    if activation is None or "down_proj" not in parts or not parts.keys() & {"gate_proj", "gate_up_proj"}:
        return lambda hidden: _first(mlp(hidden[None])).view(hidden.shape)
    both = Product(_named(mlp, ("gate_up_proj",), ("gate_proj", "up_proj")), alone)
    down = Product([parts["down_proj"]], alone)

    def gated(hidden: Tensor) -> Tensor:
        gate, up = both(hidden).chunk(2, dim=-1)
        return down(activation(gate).mul_(up))

    return gated


def _first(output: Any) -> Tensor:
    """A module's hidden states; experts return their routing besides."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _norm(module: Any) -> Map:
    """A norm; where it is a plain RMS norm, torch's own, which is one call instead of seven."""
    own: Map = module
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or epsilon is None or weight.dim() != 1:
        return own
    probe = torch.linspace(-2, 3, 2 * weight.shape[0], device=weight.device).view(2, -1).to(weight.dtype)
    if not _close(functional.rms_norm(probe, weight.shape, weight, epsilon), own(probe)):
        return own
    return lambda hidden: functional.rms_norm(hidden, module.weight.shape, module.weight, epsilon)


def _head_norm(module: Any, head_dim: int) -> Map | None:
    """A norm of heads [T, H, D], whether it sees each head alone or all as one vector (OLMo 2)."""
    if module is None:
        return None
    norm, weight = _norm(module), getattr(module, "weight", None)
    if weight is None or weight.shape[-1] == head_dim:
        return norm
    return lambda heads: norm(heads.flatten(1)).view(heads.shape)


def _close(found: Tensor, expected: Tensor) -> bool:
    error = (found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)
    return bool(error <= _SAME.get(expected.dtype, 0.05))


class _SeenError(Exception):
    """The probe has what it wanted."""


class _Probe:
    """A layer's queries and keys of two tokens as its own code makes them."""

    params: AttentionParams

    def __init__(self, decoder: Decoder, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        size = (1, len(_PROBE_POSITIONS), decoder.hidden_size)
        self.hidden = torch.randn(size, generator=generator).to(decoder.device, decoder.dtype)
        positions = torch.tensor(_PROBE_POSITIONS, device=decoder.device)
        own = decoder.position_embeddings(self.hidden, positions, _PROBE_POSITIONS[-1], index)
        if not (isinstance(own, tuple) and len(own) == 2):
            raise NotPlainError("its rotary tables are not a cosine and a sine")
        self.tables: tuple[Tensor, Tensor] = (own[0][0], own[1][0])
        try:
            decoder.run_layer(index, self.hidden, positions, own, self)
        except _SeenError:
            return
        raise NotPlainError("it attends in a way of its own")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        self.params = params
        self.seen = torch.cat((query, key), dim=1)[0].transpose(0, 1)  # [2, Hq + Hkv, D]
        raise _SeenError

    def with_rotation(self, bare: PlainLayer) -> PlainLayer:
        """The layer with the rotation that gives what was seen.

        Raises:
            NotPlainError: none does.
        """
        normed, table = _through(bare.before_attention, self.hidden[0]), self.tables[0]
        for rotation in (None, *_rotations(self.seen.shape[-1], table.shape[-1], table.device, table.dtype)):
            layer = replace(bare, rotation=rotation)
            tables = None if rotation is None else rotation.tables(*self.tables)
            queries, keys, _ = layer.project(normed, tables)
            if _close(torch.cat((queries, keys), dim=1), self.seen):
                return layer
        raise NotPlainError("its queries and keys are made in a way of its own")


@lru_cache(maxsize=16)  # layers that rotate alike share what says how, and so their tables
def _rotations(dim: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Rotation, ...]:
    """The known ways to rotate ``dim`` channels with tables [T, width].

    Either a channel turns with the one half the rotated part away, or with its neighbour; a table has a column for
    every rotated channel, or one for every two of them.
    """

    def way(rotated: int, columns: Callable[[Tensor], Tensor], *, pairs: bool) -> Rotation:
        place = torch.arange(dim, device=device)
        partner = place + 1 - 2 * (place % 2) if pairs else (place + rotated // 2) % rotated
        first = place % 2 == 0 if pairs else place < rotated // 2
        order = torch.where(place < rotated, partner, place)
        return Rotation(order, torch.where(first, -1.0, 1.0).to(dtype), columns(place[:rotated]))

    ways = [
        way(width, lambda place: place, pairs=False),  # Llama and most others
        way(width, lambda place: place, pairs=True),  # Cohere
        way(width, lambda place: place // 2, pairs=True),  # GLM-4: only the first half of its tables is read
    ]
    if 2 * width <= dim:
        ways.append(way(2 * width, lambda place: place % width, pairs=False))  # gpt-oss
    return tuple(ways)
