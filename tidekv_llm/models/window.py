"""The context window: what the model was trained for, less on request, more only where it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidekv_llm.errors import ConfigError
from tidekv_llm.models import embedded

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from tidekv_llm.models.sources import ModelSource

YARN_FACTOR = embedded.EXTENDED_WINDOW / embedded.TRAINED_WINDOW  # 4.0


def apply_window(
    config: PretrainedConfig, wanted: int | None, source: ModelSource, tokenizer_limit: int | None = None
) -> tuple[int, str | None]:
    """The window in tokens and a note on stretched positions; switches YaRN on in ``config`` if it is needed.

    Args:
        config: changed in place, before the model is built from it, and only when positions are stretched.
        wanted: what the user asked for, None for the model's own.
        source: where the model came from; only an alias can be stretched.
        tokenizer_limit: used if the config names no limit.

    Raises:
        ConfigError: not positive, or more than the model can do.
    """
    if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
        raise ConfigError(f"context_window={wanted!r} must be a positive whole number of tokens")
    trained = trained_window(config) or tokenizer_limit
    if trained is None:
        if wanted is None:
            raise ConfigError(f"{source.name} names no context length; pass context_window=<tokens>")
        return wanted, None
    if wanted is None or wanted <= trained:
        return wanted or trained, None
    if source.kind != "alias":
        raise ConfigError(
            f"context_window={wanted} is more than the {trained} tokens of {source.name}; lower it, or write "
            f"rope scaling and max_position_embeddings into the model's config.json"
        )
    if wanted > embedded.EXTENDED_WINDOW:
        raise ConfigError(
            f"context_window={wanted} is more than {source.name} can do: {trained} tokens as trained, "
            f"{embedded.EXTENDED_WINDOW} with YaRN; lower it or use another model"
        )
    _switch_yarn_on(config)
    return wanted, (
        f"YaRN is on (factor {YARN_FACTOR:g}): context_window={wanted} is beyond the {trained} tokens the "
        f"model was trained for, answers are less certain"
    )


def trained_window(config: PretrainedConfig) -> int | None:
    """Tokens the model can take as configured, None if its config does not say."""
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope: Any = getattr(text, "rope_parameters", None) or {}
    if limit and rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        # Some configs (Qwen) keep max_position_embeddings at the length before YaRN.
        return max(limit, int(rope["original_max_position_embeddings"] * float(rope.get("factor") or 1.0)))
    return limit


def _switch_yarn_on(config: PretrainedConfig) -> None:
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": YARN_FACTOR,
        "original_max_position_embeddings": embedded.TRAINED_WINDOW,
        "rope_theta": float(config.rope_parameters["rope_theta"]),
    }
    config.max_position_embeddings = embedded.EXTENDED_WINDOW
