"""Options, frozen and validated: a typo or an impossible value raises, nothing is defaulted silently."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from tidekv_llm.errors import BudgetError, ConfigError

AUTO_CHUNK: Literal["auto"] = "auto"

POOLINGS = ("passage", "max", "avg", "none")
WEIGHTS = ("uniform", "recency")
LAYOUTS = ("auto", "rectangular", "flattened")
KV_BITS = (16, 8, 4, 2)
ATTENTIONS = ("auto", "tiled", "merge", "sdpa", "flash")
BRIDGES = ("device", "host")
LAYER_BUDGETS = ("uniform", "pyramid", "cake")
HEAD_BUDGETS = ("uniform", "ada")
# Each is a file of its own in tidekv_llm/schedules/, named after it.
SCHEDULES = (
    "tidekv", "tidekv-no-evict", "post-prefill", "one-shot", "chunked", "block-snapkv", "block-recent",
    "keydiff-online", "kivi", "headinfer", "mini-sequence",
)  # fmt: skip


class NamedSelector:
    """What every selector is: enough to tell one, and its name, without importing torch."""

    name: ClassVar[str]


# Each is a file of its own in tidekv_llm/compress/selectors/, named after it, which registers its class here.
SELECTORS: dict[str, type[NamedSelector] | None] = dict.fromkeys(
    ("chunkkv", "expected-attention", "h2o", "keydiff", "random", "recent", "snapkv")
)


def selector_names() -> tuple[str, ...]:
    """Names that ``PrefillConfig(selector=...)`` takes, sorted."""
    return tuple(sorted(SELECTORS))


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """How the compressed KV cache is built.

    Args:
        chunk_size: prompt tokens per forward step, C in the paper, or ``"auto"``.
        kept_tokens: KV positions each layer keeps, K_l, mandatory ones counted inside it.
        selector: a registered name (``tidekv_llm.selectors()`` lists them) or a Selector object.
        layer_budget: how the total of ``layers * kept_tokens`` is cut between layers.
        head_budget: how a layer's budget is cut between KV heads.
        window_size: observation window W: the last prompt tokens, whose queries score all keys.
        sinks: first positions that are always kept.
        kernel_size: odd width of the pooling over neighbouring scores.
        pooling: ``"passage"`` keeps lines and sentences whole, ``"max"`` and ``"avg"`` look at ``kernel_size``
            neighbours, ``"none"`` at each position alone.
        weights: weights w_q of the observation queries (Eq. 7): ``"uniform"`` or ``"recency"``.
        beta: steepness of ``layer_budget="pyramid"``: the last layer gets a beta-th of the mean.
        floor_alpha: part of a layer's budget that ``head_budget="ada"`` shares out evenly, from 0 to 1.
        layout: how the cache is stored; ``"auto"`` is rectangular unless heads differ or keys are quantised.
        kv_bits: 8, 4 or 2 quantises the kept prompt once it is selected; 16 stores it as it is.
        kv_residual: most recent kept positions that ``kv_bits`` leaves in full precision.
        score_block_size: keys scored at once, b_s; temporary memory grows with it, not with the prompt.
        schedule: which construction order; ``"tidekv"`` is layer-major with delayed eviction.
        attention: attention backend, or ``"auto"``.
        bridge: where the hidden states between layers lie: ``"device"``, or ``"host"`` (pinned, double-buffered on
            CUDA), so that the device holds one layer's KV and a few chunks only. It changes no result.
        mlp_chunk_size: tokens per call of a layer's MLP, to split it further than attention; 0 does not split.

    Raises:
        ConfigError: an option is out of range or unknown.
        BudgetError: ``kept_tokens`` is below ``window_size + sinks``.
    """

    chunk_size: int | Literal["auto"] = 2048
    kept_tokens: int = 4096
    selector: str | NamedSelector = "snapkv"
    layer_budget: str = "uniform"
    head_budget: str = "uniform"
    window_size: int = 16
    sinks: int = 4
    kernel_size: int = 21
    pooling: str = "max"
    weights: str = "uniform"
    beta: int = 20
    floor_alpha: float = 0.5
    layout: str = "auto"
    kv_bits: int = 16
    kv_residual: int = 32
    score_block_size: int = 1024
    schedule: str = "tidekv"
    attention: str = "auto"
    bridge: str = "device"
    mlp_chunk_size: int = 0

    def __post_init__(self) -> None:
        if self.chunk_size != AUTO_CHUNK:
            whole_number("chunk_size", self.chunk_size, least=1, alternative='or "auto"')
        whole_number("kept_tokens", self.kept_tokens, least=1)
        whole_number("window_size", self.window_size, least=1)
        whole_number("score_block_size", self.score_block_size, least=1)
        whole_number("kernel_size", self.kernel_size, least=1)
        if self.kernel_size % 2 == 0:
            raise ConfigError(f"kernel_size={self.kernel_size} must be odd; use {self.kernel_size + 1}")
        whole_number("sinks", self.sinks, least=0)
        if not _is_int(self.mlp_chunk_size) or self.mlp_chunk_size < 0:
            raise ConfigError(f"mlp_chunk_size={self.mlp_chunk_size!r} must be a whole number, 0 for no split")
        _one_of("pooling", self.pooling, POOLINGS)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("bridge", self.bridge, BRIDGES)
        _one_of("weights", self.weights, WEIGHTS)
        whole_number("beta", self.beta, least=1)
        self._check_storage()
        mandatory = self.window_size + self.sinks
        if self.kept_tokens < mandatory:
            raise BudgetError(
                f"kept_tokens={self.kept_tokens} must be at least window_size+sinks={mandatory}; "
                f"raise kept_tokens to {mandatory} or more"
            )
        self._check_names()

    def _check_storage(self) -> None:
        _one_of("layout", self.layout, LAYOUTS)
        if self.kv_bits not in KV_BITS or not _is_int(self.kv_bits):
            raise ConfigError(f"kv_bits={self.kv_bits!r} is unknown; choose one of 16, 8, 4, 2")
        whole_number("kv_residual", self.kv_residual, least=0)
        if isinstance(self.floor_alpha, bool) or not isinstance(self.floor_alpha, (int, float)):
            raise ConfigError(f"floor_alpha={self.floor_alpha!r} must be a number from 0 to 1")
        if not 0 <= self.floor_alpha <= 1:
            raise ConfigError(f"floor_alpha={self.floor_alpha!r} must be a number from 0 to 1")
        if self.layout == "rectangular" and (self.head_budget != "uniform" or self.kv_bits < 16):
            raise ConfigError(
                "layout='rectangular' has one length for all heads and full precision; use layout='auto' with "
                f"head_budget={self.head_budget!r} and kv_bits={self.kv_bits}"
            )

    def _check_names(self) -> None:
        if isinstance(self.selector, str):
            _one_of("selector", self.selector, selector_names())
        elif not isinstance(self.selector, NamedSelector):
            raise ConfigError(
                f"selector={self.selector!r} must be a name ({', '.join(selector_names())}) or a Selector"
            )
        elif not isinstance(getattr(self.selector, "name", None), str):
            raise ConfigError(f"selector {type(self.selector).__name__} has no name; give the class a `name` string")
        _one_of("layer_budget", self.layer_budget, LAYER_BUDGETS)
        _one_of("head_budget", self.head_budget, HEAD_BUDGETS)
        _one_of("schedule", self.schedule, SCHEDULES)

    @property
    def tokens_per_chunk(self) -> int:
        """C, once ``"auto"`` was replaced by a number."""
        assert self.chunk_size != AUTO_CHUNK
        return int(self.chunk_size)

    def replace(self, **changes: Any) -> PrefillConfig:
        """A copy with some options changed; an unknown name raises :class:`ConfigError`."""
        check_option_names(changes)
        return replace(self, **changes)


def check_option_names(options: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` if a name is no option of :class:`PrefillConfig`."""
    known = PrefillConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown prefill option {name!r}; the options are {', '.join(known)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(name: str, value: object, *, least: int, alternative: str = "") -> None:
    """Refuse an option or parameter that is no whole number from ``least`` on.

    Raises:
        ConfigError: with the value and what it must be, or what else it may be.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        tail = f" {alternative}" if alternative else ""
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}{tail}")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
