"""A model in memory, shared by engines with different options, and how long it stays there."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self
from weakref import WeakSet

import torch

from tidekv_llm.cache.cache_file import CacheOwner
from tidekv_llm.decode.loop import LayerByLayer
from tidekv_llm.decode.plain import PlainDecoder
from tidekv_llm.decode.reasoning import ReasoningFormat
from tidekv_llm.documents.template import TurnEnd, turn_end
from tidekv_llm.errors import ClosedError, ConfigError
from tidekv_llm.hf import Decoder
from tidekv_llm.lock import FairLock
from tidekv_llm.memory import weight_bytes
from tidekv_llm.models.shapes import shape_of
from tidekv_llm.prefixes.identity import model_identity
from tidekv_llm.prefixes.pool import PrefixPool
from tidekv_llm.selfcheck import check_decoder, plain_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tidekv_llm.shapes import ModelShape


class Weights:
    """A model, its tokenizer, and what all that use them share: whose turn it is, and the stored prefixes.

    Args:
        model: a transformers causal language model.
        tokenizer: its tokenizer, if there is one.
        name: what to call it.
        compute_dtype: what its layers compute in (:class:`~tidekv_llm.hf.Decoder`).

    Raises:
        UnsupportedModelError: the self-check failed.
        ConfigError: the weights cannot be computed in another dtype than they are stored in.
    """

    _all: ClassVar[WeakSet[Weights]] = WeakSet()

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.decoder = Decoder(model, compute_dtype)
        self.lock = FairLock()
        self.users = 0
        self.pool = PrefixPool()
        check_decoder(self.decoder)
        self._plain: tuple[object, PlainDecoder | None, str] | None = None
        Weights._all.add(self)
        self.steps()
        self.nbytes = weight_bytes(model)  # last: what decodes from a small form has made it by now

    def steps(self) -> tuple[PlainDecoder | LayerByLayer, str]:
        """How answers are decoded, and a note if that is not the quick way; found again if modules were exchanged."""
        modules = tuple(map(id, self.decoder.layers.modules())), self.decoder.dtype, self.decoder.device
        if self._plain is None or self._plain[0] != modules:
            self._plain = (modules, *plain_decoder(self.decoder, self._alone))
        _, plain, note = self._plain
        return plain or LayerByLayer(self.decoder), note

    def _alone(self) -> bool:
        """Whether no other model is at work in this process."""
        return not any(other.lock.waiting for other in list(Weights._all) if other is not self)

    @cached_property
    def identity(self) -> str:
        """What tells these weights from others in a stored prefix's key."""
        return model_identity(self.model, self.decoder.compute_dtype)

    @property
    def owner(self) -> CacheOwner:
        """What a saved cache must have been saved for."""
        digest = hashlib.sha256(self.identity.encode()).hexdigest()[:16]
        return CacheOwner.of(self.decoder, f"{self.name}@{digest}")

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions, as the planner uses them."""
        return shape_of(self.decoder, self.nbytes)

    @property
    def trained_window(self) -> int:
        """Most tokens that the model's own configuration allows."""
        return int(getattr(self.decoder.config, "max_position_embeddings", 0) or 2**31 - 1)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a turn: what the model or its tokenizer names, and what its template puts there."""
        named = getattr(self.model.generation_config, "eos_token_id", None)
        ids = set(named) if isinstance(named, (list, tuple)) else {named}
        ids |= {getattr(self.tokenizer, f"{end}_token_id", None) for end in ("eos", "eot", "eom")}
        ids.add(self.turn_end.token_id)
        return frozenset(token for token in ids if token is not None)

    @cached_property
    def turn_end(self) -> TurnEnd:
        """What the chat template puts behind an assistant's turn."""
        # Where channels are named, every message ends so, and only the last channel's end is the turn's.
        return TurnEnd() if self.tokenizer is None or self.reasoning_format.channels else turn_end(self.tokenizer)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat:
        """How the model marks its reasoning."""
        return ReasoningFormat.of(self.tokenizer)

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ConfigError: there is none.
        """
        if self.tokenizer is None:
            raise ConfigError("this engine has no tokenizer; pass one to TideKV(...), or token ids as the prompt")
        return self.tokenizer


class Hold:
    """One user's hold on weights: their memory is free once the last hold is let go."""

    def __init__(self, weights: Weights) -> None:
        weights.users += 1
        self._weights: Weights | None = weights

    def get(self) -> Weights:
        """The weights.

        Raises:
            ClosedError: the hold was let go.
        """
        if self._weights is None:
            raise ClosedError("this engine was closed; make a new one")
        return self._weights

    def share(self) -> Hold:
        """Another hold on the same weights."""
        return Hold(self.get())

    def let_go(self) -> None:
        """Give the weights up; a second time does nothing."""
        if self._weights is not None:
            self._weights.users -= 1
            self._weights = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


class WeightsUser:
    """What is done with a hold on weights: they are shown while it is open, and let go of when it is closed."""

    _hold: Hold

    def close(self) -> None:
        """Let go of the model; its memory is freed when the last engine that shares it is closed."""
        self._hold.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self._open().model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The transformers tokenizer."""
        return self._open().tokenizer

    @property
    def device(self) -> torch.device:
        """Where prompts go in."""
        return self._open().decoder.device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every device that holds a part of the model."""
        return self._open().decoder.devices

    @property
    def name(self) -> str:
        """What the model is called."""
        return self._open().name

    @property
    def shape(self) -> ModelShape:
        """The model's dimensions, as the planner uses them."""
        return self._open().shape

    @property
    def decoder(self) -> Decoder:
        """The model taken apart into layers, for tools that run them."""
        return self._open().decoder

    @property
    def steps(self) -> PlainDecoder | LayerByLayer:
        """How answers are decoded, for tools that decode."""
        return self._open().steps()[0]

    @property
    def cache_owner(self) -> CacheOwner:
        """What a saved cache must have been saved for (``cache.save(path, llm.cache_owner)``)."""
        return self._open().owner

    def _open(self) -> Weights:
        return self._hold.get()
