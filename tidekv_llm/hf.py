"""Hugging Face's layer and cache conventions, all in this file; names inside a layer are :mod:`~tidekv_llm.layers`'.

A decoder layer is called as it is, with our attention function in place of its own and a :class:`LayerState`
as its cache. The model's own setting is changed only while one of its layers runs, so between calls it is the
user's model as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tidekv_llm.attention import Attending, AttentionDispatch, AttentionParams, BoundKeys, Scratch, softcap_
from tidekv_llm.errors import ConfigError, UnsupportedModelError
from tidekv_llm.hardware import fastest_compute, prefers_tiles
from tidekv_llm.weights.ready import ReadyLayers, buffer_bytes, convertible

ATTENTION_NAME = "tidekv"
CACHE_ATTENTION_NAME = "tidekv_cache"
BACKBONE_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


class LayerState(Attending, Protocol):
    """What a layer finds as its cache and our attention function calls back."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, Hkv, C, D]; return all that the queries may see."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this call."""


@dataclass(frozen=True)
class _Stored:
    """A layer state in the storage dtype, for a layer that computes in another."""

    state: LayerState
    dtype: torch.dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.state.update(key_states.to(self.dtype), value_states.to(self.dtype), *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.state.get_seq_length(layer_idx)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        return self.state.attend(query.to(self.dtype), key, value, params).to(query.dtype)


class KeysValuesOnly(Exception):
    """Raised by a LayerState's ``attend`` once keys and values are stored and nothing else of the layer is needed.

    Algorithm 1 needs no outputs from the last layer but those of the last token: leaving it here skips the
    attention, the output projection and the MLP for all other tokens, in any model family.
    """


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tidekv: Attending | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: hand the rotated tensors to the layer state."""
    if tidekv is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention; this family is unsupported"
        )
    params = AttentionParams(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return tidekv.attend(query, key, value, params), None


def _cache_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function for ``model.generate()``: the keys know their layer, or all of them are there."""
    state = key.layer if isinstance(key, BoundKeys) else _AllKeys()
    return _attention(module, query, key, value, attention_mask, **{**kwargs, "tidekv": state})


class _AllKeys:
    """A layer that stores rectangularly: its update returned everything the queries may see."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        return AttentionDispatch().attend(query, key, value, params, Scratch())[0]


@contextmanager
def tidekv_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let ``model.generate(cache=...)`` read a compressed cache of any layout while the block runs.

    The model's own attention comes back afterwards. Prompts of a batch must be equally long: padding masks are
    not looked at.
    """
    with _attention_called(CACHE_ATTENTION_NAME, _backbone(model).config):
        yield


@contextmanager
def _attention_called(name: str, config: Any) -> Iterator[None]:
    """Let a model's layers attend with the registered function ``name`` while the block runs."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionInterface.register(CACHE_ATTENTION_NAME, _cache_attention)


class Decoder:
    """A causal language model, taken apart into embedding, layers and head.

    Args:
        model: a transformers causal language model.
        compute_dtype: what its layers compute in once they are made ready; default: what is fastest here.

    Raises:
        UnsupportedModelError: the model lacks a part that the adapter needs, or has one it does not know.
        ConfigError: the weights cannot be computed in another dtype than they are stored in.
    """

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.backbone: Any = _backbone(model)
        self.config: Any = self.backbone.config
        self.layers: nn.ModuleList = self.backbone.layers
        self.head: Any = model.get_output_embeddings()
        if self.head is None:
            raise UnsupportedModelError(f"{type(model).__name__} has no output head; load a causal language model")
        self.layer_types = _layer_types(self.config, len(self.layers))
        self._cache_argument = _cache_argument(self.layers[0])
        self._rotary_takes_layer_type = "layer_type" in inspect.signature(self.backbone.rotary_emb.forward).parameters
        self.compute_dtype = self._compute_dtype(compute_dtype)
        self._at_work: ReadyLayers | None = None

    def _compute_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        if not convertible(self.layers):
            if wanted not in (None, self.dtype):
                raise ConfigError(
                    f"compute_dtype={wanted}: these weights are packed, or fetched by hooks of accelerate, and compute "
                    "as they are; leave compute_dtype out"
                )
            return self.dtype
        return wanted or fastest_compute(self.dtype, next(self.layers.parameters()).device)

    @property
    def num_layers(self) -> int:
        """N."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Hq."""
        return int(self.config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """Hkv."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.num_heads)

    @property
    def head_dim(self) -> int:
        """D."""
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.num_heads)

    @property
    def hidden_size(self) -> int:
        """d_model."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return int(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which weights, hidden states between layers, keys and values are stored."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the embedding, where prompts go in."""
        return _execution_device(self.backbone.embed_tokens)

    def attention(self, name: str) -> AttentionDispatch:
        """The backend called ``name``; of ``"auto"`` the one that is fastest for these numbers on this machine."""
        return AttentionDispatch(name, tiles=prefers_tiles(self.dtype.itemsize))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that layers lie on, in order of first use."""
        return tuple(dict.fromkeys((self.device, *(self.layer_device(index) for index in range(self.num_layers)))))

    def layer_device(self, layer: int) -> torch.device:
        """Where a layer's keys and values are computed."""
        return _execution_device(self.layers[layer])

    def sliding_window(self, layer: int) -> int | None:
        """Window of a sliding-window layer in tokens, None for full attention."""
        if self.layer_types[layer] == "sliding_attention":
            return int(self.config.sliding_window)
        return None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention: those that share a budget."""
        return tuple(index for index in range(self.num_layers) if self.sliding_window(index) is None)

    @property
    def rope_depends_on_length(self) -> bool:
        """Whether keys of the same tokens differ between prompts of different length (dynamic, longrope)."""
        settings = getattr(self.config, "rope_parameters", None) or getattr(self.config, "rope_scaling", None) or {}
        kinds = [settings, *(value for value in settings.values() if isinstance(value, dict))]
        return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)

    def max_exact_length(self) -> int | None:
        """Prompt length up to which every layer's attention is computed as the family defines it."""
        if "chunked_attention" in self.layer_types:
            return int(self.config.attention_chunk_size)
        return None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [B, C, d_model] that enter layer 0."""
        hidden: Tensor = self.backbone.embed_tokens(token_ids.to(self.device))
        # Granite scales outside the embedding; Gemma's embedding scales by itself.
        multiplier = getattr(self.backbone, "embedding_multiplier", None)
        return hidden if multiplier is None else hidden * multiplier

    def position_embeddings(self, hidden: Tensor, positions: Tensor, last_position: int, layer: int) -> Any:
        """Rotary tables for ``positions`` [C] of one layer.

        The prompt's last position rides along and is cut off again: prompt-dependent RoPE (dynamic, longrope)
        chooses its factors from the largest position it sees, which must be the whole prompt's in every chunk.
        """
        rotary, hidden = self.backbone.rotary_emb, hidden[:, :1].to(self._working_dtype)  # only its dtype counts
        # Filled on the device: a tensor made from a list is copied there, and the host waits for it.
        last = torch.full((1,), last_position, dtype=positions.dtype, device=positions.device)
        extended = torch.cat((positions, last))[None]
        if self._rotary_takes_layer_type:
            tables = rotary(hidden, extended, self.layer_types[layer])
        else:
            tables = rotary(hidden, extended)
        if isinstance(tables, tuple):
            return tuple(table[:, :-1] for table in tables)
        return tables[:, :-1]

    @contextmanager
    def ready(self, layers: ReadyLayers, index: int) -> Iterator[None]:
        """Layer ``index`` computes in :attr:`compute_dtype` while the block runs."""
        with layers.ready(index):
            self._at_work = layers
            try:
                yield
            finally:
                self._at_work = None

    def ready_layers(self) -> ReadyLayers:
        """What makes the layers of one prompt ready."""
        return ReadyLayers(self.layers, self.compute_dtype)

    @property
    def buffer_bytes(self) -> int:
        """Bytes that making layers ready takes."""
        return buffer_bytes(self.layers, self.compute_dtype)

    @property
    def _working_dtype(self) -> torch.dtype:
        return self.dtype if self._at_work is None else self.compute_dtype

    def run_layer(
        self,
        layer: int,
        hidden: Tensor,
        positions: Tensor,
        position_embeddings: Any,
        state: LayerState,
        mlp_chunk_size: int = 0,
    ) -> Tensor:
        """One layer over one chunk: hidden [B, C, d_model] at ``positions`` [C] to hidden of the same shape.

        It computes in :attr:`compute_dtype` while the layer is ready, else in :attr:`dtype`, and so is the output.
        With ``mlp_chunk_size`` the layer's MLP sees at most so many tokens at a time.
        """
        dtype = self._working_dtype
        state = state if dtype == self.dtype else _Stored(state, self.dtype)
        own_attention = _attention_called(ATTENTION_NAME, self.config)
        with own_attention, _split_mlp(self.layers[layer], mlp_chunk_size, hidden.shape[1]):
            output = self.layers[layer](
                hidden.to(dtype),
                attention_mask=None,
                position_embeddings=position_embeddings,
                position_ids=positions[None],
                use_cache=True,
                tidekv=state,
                **{self._cache_argument: state},
            )
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def whole_forward(self, token_ids: Tensor, cache: Any) -> Tensor:
        """The model's own forward over a whole prompt [B, S], with its own attention, keys and values into ``cache``.

        Returns the last layer's output [B, S, d_model], before the final norm like :meth:`run_layer`'s.
        """
        outputs: list[Tensor] = []
        hook = self.backbone.norm.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
        try:
            self.backbone(token_ids.to(self.device), use_cache=True, **{_cache_argument(self.backbone): cache})
        finally:
            hook.remove()
        return outputs[-1]

    def own_logits(self, token_ids: Tensor) -> Tensor:
        """Next-token logits float32 [vocab] by the model's own forward over ids [1, S]."""
        few = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        last = {"logits_to_keep": 1} if few else {}  # a head that is made of a small form takes long for all of them
        logits: Tensor = self.model(token_ids.to(self.device), use_cache=False, **last).logits
        return logits[0, -1].float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits float32 [B, vocab] from the last layer's output [B, d_model]."""
        logits: Tensor = self.head(self.backbone.norm(hidden.to(self.dtype))).float()
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        return softcap_(logits, getattr(self.config, "final_logit_softcapping", None))  # Gemma 2


@contextmanager
def _split_mlp(layer: nn.Module, size: int, length: int) -> Iterator[None]:
    """Let ``layer.mlp`` see at most ``size`` tokens at a time; 0 or a short chunk changes nothing.

    Raises:
        UnsupportedModelError: the layer's MLP goes by another name, or returns more than hidden states.
    """
    if not 0 < size < length:
        yield
        return
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        raise UnsupportedModelError(f"{type(layer).__name__} has no part called mlp; leave mlp_chunk_size at 0")
    whole, own = mlp.forward, mlp.__dict__.get("forward")

    def by_pieces(hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        for start in range(0, hidden.shape[1], size):
            piece = whole(hidden[:, start : start + size])
            if not isinstance(piece, Tensor):
                raise UnsupportedModelError(f"{type(mlp).__name__} returns a tuple; leave mlp_chunk_size at 0")
            out[:, start : start + size] = piece
        return out

    mlp.forward = by_pieces
    try:
        yield
    finally:
        if own is None:
            del mlp.forward
        else:
            mlp.forward = own


def _backbone(model: PreTrainedModel) -> Any:
    """The stack of decoder layers inside a causal language model."""
    candidates = [getattr(model, "get_decoder", lambda: None)(), getattr(model, "model", None)]
    candidates += [getattr(candidate, "language_model", None) for candidate in candidates]
    missing = "decoder layers"
    for candidate in candidates:
        if candidate is not None:
            absent = [part for part in BACKBONE_PARTS if getattr(candidate, part, None) is None]
            if not absent:
                return candidate
            missing = ", ".join(absent)
    raise UnsupportedModelError(
        f"{type(model).__name__} lacks {missing}; families with learned positions, recurrent or encoder layers "
        "are unsupported"
    )


def _execution_device(module: nn.Module) -> torch.device:
    """Where a module computes: of offloaded weights, which lie on ``meta``, accelerate's hook knows it.

    Raises:
        UnsupportedModelError: the weights are nowhere, and nothing brings them to a device.
    """
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            device = getattr(each, "execution_device", None)
            if device is not None and next(part.parameters(), None) is not None:
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    own: torch.device = next(module.parameters()).device
    if own.type == "meta":
        raise UnsupportedModelError(
            f"the weights of {type(module).__name__} are on the meta device and no hook of accelerate brings them to "
            "another; load the model with device_map"
        )
    return own


def _layer_types(config: Any, num_layers: int) -> tuple[str, ...]:
    """One attention kind per layer; families without the list have a window in all layers or in none."""
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(f"{config.model_type}: layers that share another layer's KV are unsupported")
    types = getattr(config, "layer_types", None)
    if types is None:
        window = getattr(config, "sliding_window", None)
        types = ["full_attention" if window is None else "sliding_attention"] * num_layers
    for kind in types:
        if kind not in LAYER_TYPES:
            raise UnsupportedModelError(f"{config.model_type}: layer type {kind!r} is unsupported")
    return tuple(types)


def _cache_argument(layer: Any) -> str:
    """Transformers 5.12 calls it ``past_key_values``, 5.24 ``cache``."""
    parameters = inspect.signature(layer.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModelError(f"{type(layer).__name__} takes no KV cache")
