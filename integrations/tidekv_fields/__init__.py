"""The fields and the life cycle that every integration's model class has; needs pydantic, which both bring."""

from __future__ import annotations

import threading
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from tidekv_llm.config import PrefillConfig
from tidekv_llm.service import CALL_OPTIONS, CallOptions, EngineHandle, EngineSpec, call_options, model_identity

DEFAULT_MODEL = "smollm2-135m"

_PREFILL_OPTIONS = tuple(PrefillConfig.__dataclass_fields__)
_OF_THE_ENGINE = ("device", "dtype", "context_window", "load_options")
_handle_lock = threading.Lock()


class TideKVFields(BaseModel):
    """A mixin; put it before the framework's base class.

    The options of :class:`PrefillConfig` are accepted flat as well (``kept_tokens=512``), and so is
    ``max_new_tokens`` for ``max_tokens``.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str = Field(default=DEFAULT_MODEL, description="Alias, folder, GGUF file or hub id.")
    max_tokens: int = Field(default=256, gt=0, description="Most tokens to generate.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 takes the most likely token.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling; 1 for none.")
    top_k: int = Field(default=0, ge=0, description="Sample among so many tokens; 0 for all.")
    stop: list[str] = Field(default_factory=list, description="Strings before which the text is cut.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    drafts: int | None = Field(
        default=None, ge=0, description="Most tokens that the document may suggest per step; default: 16, 0 for none."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Least share of the best token's probability.")
    repetition_penalty: float | None = Field(default=None, gt=0, description="Above 1: fewer repetitions.")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Off tokens that the answer has.")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="The same for each occurrence.")
    logit_bias: dict[int, float] | None = Field(default=None, description="Token id -> added to its logit.")
    context_window: int | None = Field(default=None, gt=0, description="Tokens; default: the model's own.")
    prefill: Any = Field(default=None, description="A PrefillConfig; its options may be given flat instead.")
    prefix_cache_bytes: int | None = Field(
        default=None, gt=0, description="Host memory for reusing a document that several questions share."
    )
    device: str | None = Field(default=None, description="'cpu', 'cuda:0'; default: the GPU if there is one.")
    dtype: str | None = Field(default=None, description="Of the weights: 'bfloat16', 'float32', 'auto'.")
    load_options: dict[str, Any] = Field(default_factory=dict, description="For TideKV.from_pretrained.")
    chat_template: bool = Field(default=True, description="Send plain strings through the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Values for the template's own names, such as {'enable_thinking': False}."
    )
    timeout: float | None = Field(default=None, gt=0.0, description="Seconds before a request is stopped.")
    engine: Any = Field(default=None, exclude=True, repr=False, description="A TideKV to use as it is.")

    _handle: EngineHandle | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _accept_aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "max_new_tokens" in values:
            if "max_tokens" in values:
                raise ValueError("max_tokens and max_new_tokens are the same option; give one of them")
            values["max_tokens"] = values.pop("max_new_tokens")
        flat = {name: values.pop(name) for name in _PREFILL_OPTIONS if name in values}
        if flat and values.get("prefill") is not None:
            raise ValueError(f"give {', '.join(flat)} inside prefill= or without it, not both ways")
        return {**values, "prefill": flat} if flat else values

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else list(value or ())
        if "" in stops:
            raise ValueError("a stop string is empty; leave it out")
        return stops

    @field_validator("prefill", mode="before")
    @classmethod
    def _prefill_as_config(cls, value: Any) -> PrefillConfig | None:
        if value is None or isinstance(value, PrefillConfig):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"prefill={value!r} must be a PrefillConfig or a dict of its options")
        unknown = [name for name in value if name not in _PREFILL_OPTIONS]
        if unknown:
            raise ValueError(f"unknown prefill option {unknown[0]!r}; the options are {', '.join(_PREFILL_OPTIONS)}")
        return PrefillConfig(**value)

    @model_validator(mode="after")
    def _engine_has_its_own(self) -> Self:
        if self.engine is None:
            return self
        clash = [name for name in _OF_THE_ENGINE if getattr(self, name)]
        if clash:
            raise ValueError(f"{clash[0]}= belongs to the model that engine= has already; leave one of them out")
        if not hasattr(self.engine, "with_prefill"):
            raise ValueError(f"engine={self.engine!r} must be a tidekv_llm.TideKV")
        self.__dict__["model"] = self.engine.name  # not an assignment: that would validate, and come here again
        return self

    # --- the engine -------------------------------------------------------------------------------------

    def engine_handle(self) -> EngineHandle:
        """The engine that the present fields name; nothing is loaded."""
        spec = EngineSpec(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            context_window=self.context_window,
            load_options=self.load_options,
            prefill=self.prefill,
            prefix_cache_bytes=self.prefix_cache_bytes,
            engine=self.engine,
        )
        with _handle_lock:
            if self._handle is None or self._handle.spec != spec:
                self._handle = EngineHandle(spec)
            return self._handle

    def close(self) -> None:
        """Free the weights, unless another open object uses them; using this one afterwards is an error."""
        self.engine_handle().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def call_options(self, stop: Any, overrides: dict[str, Any]) -> CallOptions:
        """What the engine is called with; see :func:`tidekv_llm.service.requests.call_options`."""
        return call_options(self.sampling_fields(), stop, overrides)

    def sampling_fields(self) -> dict[str, Any]:
        """The fields that a call can change."""
        return {name: getattr(self, name) for name in (*CALL_OPTIONS, "stop") if name != "max_new_tokens"}

    def identity(self) -> dict[str, Any]:
        """All on which the answer depends, the weights themselves too, for traces and cache keys; plain values."""
        engine = self.engine
        return {
            "model": self.model,
            "weights": model_identity(self.engine_handle()),
            **self.sampling_fields(),
            "own_stop": self.stop,  # both hold, but LangChain writes a call's over "stop"
            "context_window": self.context_window if engine is None else engine.context_window,
            "prefill": repr(self.prefill or (PrefillConfig() if engine is None else engine.config)),
            "device": self.device,
            "dtype": self.dtype,
            "load_options": {key: repr(value) for key, value in self.load_options.items()},
            "chat_template": self.chat_template,
        }

    # --- copies: names are copied, weights never --------------------------------------------------------

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied._handle = None
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        shared = {} if memo is None else memo
        if self.engine is not None:
            shared[id(self.engine)] = self.engine
        return super().__deepcopy__(shared)

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise TypeError("an object made with engine= cannot be pickled; name the model with model= instead")
        return super().__getstate__()
