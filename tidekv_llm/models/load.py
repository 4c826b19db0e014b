"""From a source to a model in memory: safe weights only, dtype, device, context window."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidekv_llm.errors import (
    ConfigError,
    MemoryLimitError,
    ModelError,
    ModelNotFoundError,
    TideKVError,
    UnsafeWeightsError,
    UnsupportedModelError,
    one_line,
    reason,
)
from tidekv_llm.hardware import default_device, stored_as
from tidekv_llm.memory import weight_bytes
from tidekv_llm.models import embedded
from tidekv_llm.models.loading import Progress, only_our_progress
from tidekv_llm.models.sources import CONVERT_REMEDY, ModelSource, hub_reason, resolve
from tidekv_llm.models.window import apply_window
from tidekv_llm.sizes import format_bytes

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("tidekv_llm")

_HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "force_download", "proxies")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready for inference.

    Attributes:
        model: in eval mode, no parameter requires a gradient.
        tokenizer: its tokenizer.
        name: as the user gave it.
        context_window: most tokens, prompt and answer together.
        rope_note: how positions were stretched beyond training, None if they were not.
        source: where it came from.
        compute_dtype: what its layers shall compute in, None for what is fastest here.
        weights_note: why a GGUF file's weights were unpacked, and to how much; None if they were not.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    context_window: int
    rope_note: str | None = None
    source: ModelSource
    compute_dtype: torch.dtype | None = None
    weights_note: str | None = None


def load(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    compute_dtype: str | torch.dtype | None = None,
    weight_bits: int = 16,
    context_window: int | None = None,
    progress: Progress | None = None,
    **transformers_options: Any,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: an alias, a folder with safetensors, a GGUF file, or a hub id.
        device: ``"cpu"``, ``"cuda:0"``...; default: the GPU if there is one. Excludes ``device_map``.
        dtype: of the weights, ``"auto"`` for the checkpoint's own. Default: bfloat16 for checkpoints of two
            bytes a number and where the device multiplies it natively, else float32
            (:func:`tidekv_llm.hardware.stored_as`).
        compute_dtype: what layers compute in, made ready one at a time. Default: float32 on a CPU that does not
            multiply bfloat16 natively, else as stored.
        weight_bits: 8 (a scale per row) or 4 (a scale and a zero per 32 numbers; embedding and head in 8)
            quantises while loading: less memory, answers no longer those of the checkpoint. On a CPU only.
        context_window: tokens; default: what the model was trained for. smollm2-135m goes up to 32,768
            with YaRN.
        progress: called with a message and the fraction done while the embedded model is fetched, and while
            a GGUF file is unpacked.
        **transformers_options: ``device_map``, ``quantization_config``, ``revision``... as in
            ``from_pretrained``.

    Raises:
        ModelNotFoundError: nothing by that name.
        ModelDownloadError: the embedded model could not be fetched, checked or stored.
        UnsafeWeightsError: pickle weights, or remote code.
        UnsupportedModelError: not a causal language model that this transformers release knows.
        ConfigError: an impossible device, dtype or context window.
        MemoryLimitError: the weights do not fit.
        ModelError: anything else that transformers raised.
    """
    _refuse_remote_code(transformers_options)
    hub_options = {key: transformers_options[key] for key in _HUB_OPTIONS if key in transformers_options}
    resolve_options = {key: hub_options[key] for key in ("revision", "token", "cache_dir") if key in hub_options}
    source = resolve(name_or_path, **resolve_options)
    if source.kind == "alias":
        folder = embedded.ensure_embedded(progress)
        source = ModelSource(kind="alias", name=source.name, path=folder)
    _check_bits(weight_bits, device, source, transformers_options)
    chosen_device = _device(device, transformers_options)
    legacy_dtype = transformers_options.pop("torch_dtype", None)  # its name before transformers 5
    computing = None if compute_dtype is None else _floating("compute_dtype", compute_dtype)
    wanted_dtype = _dtype(legacy_dtype if dtype is None else dtype)
    with only_our_progress(progress), _one_line_errors(source):
        where, file_options = _location(source, hub_options)
        config = _read_config(where, file_options, transformers_options.pop("config", None))
        tokenizer = _read_tokenizer(where, file_options, source)
        window, rope_note = apply_window(config, context_window, source, _tokenizer_limit(tokenizer))
        small = weight_bits < 16 or source.kind == "gguf"
        chosen_dtype = wanted_dtype or _stored_dtype(config, small, chosen_device or default_device())
        options = {**file_options, **transformers_options, "dtype": chosen_dtype}
        note: str | None = None
        if weight_bits < 16:
            model = _read_quantised(where, config, source, weight_bits, options)
        else:
            model, note = _read_gguf(config, source, chosen_device, options, progress)
            if model is None:
                model = _read_weights(where, config, source, chosen_device, options)
                note = note and f"{note} {format_bytes(weight_bytes(model))} in memory"
    if rope_note:
        logger.warning("%s: %s", source.name, rope_note)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=source.name,
        context_window=window,
        rope_note=rope_note,
        source=source,
        compute_dtype=computing,
        weights_note=note,
    )


@dataclass(frozen=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer without the weights.

    Attributes:
        tokenizer: the model's own.
        context_window: most tokens, prompt and answer together.
    """

    tokenizer: PreTrainedTokenizerBase
    context_window: int


def load_tokenizer(
    name_or_path: str | os.PathLike[str],
    *,
    context_window: int | None = None,
    progress: Progress | None = None,
    **transformers_options: Any,
) -> LoadedTokenizer:
    """Only the tokenizer of a model, to count tokens with; arguments and errors are those of :func:`load`."""
    _refuse_remote_code(transformers_options)
    hub_options = {key: transformers_options[key] for key in _HUB_OPTIONS if key in transformers_options}
    source = resolve(
        name_or_path, **{key: hub_options[key] for key in ("revision", "token", "cache_dir") if key in hub_options}
    )
    if source.kind == "alias":
        source = ModelSource(kind="alias", name=source.name, path=embedded.ensure_embedded(progress))
    with only_our_progress(progress), _one_line_errors(source):
        where, file_options = _location(source, hub_options)
        config = _read_config(where, file_options, transformers_options.pop("config", None))
        tokenizer = _read_tokenizer(where, file_options, source)
        window, _ = apply_window(config, context_window, source, _tokenizer_limit(tokenizer))
    return LoadedTokenizer(tokenizer=tokenizer, context_window=window)


# -- options --------------------------------------------------------------------------------------------


def _refuse_remote_code(options: dict[str, Any]) -> None:
    if options.pop("trust_remote_code", None):
        raise UnsafeWeightsError(
            "trust_remote_code=True would run code from the model's repository; TideKV does not: "
            "leave it out and use a model whose family transformers has built in"
        )
    if options.pop("use_safetensors", True) is False:
        raise UnsafeWeightsError(f"use_safetensors=False would load pickle weights; {CONVERT_REMEDY}")


def _device(device: str | torch.device | None, options: Mapping[str, Any]) -> torch.device | None:
    """The device to load to; None leaves it to ``device_map``."""
    import torch

    if options.get("device_map") is not None:
        if device is not None:
            raise ConfigError(f"device={device!s} and device_map={options['device_map']!r}: give one of them")
        return None
    if device is None:
        return default_device()
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):  # its message lists every backend there ever was
        raise ConfigError(f"device={device!r} is no device; use 'cpu', 'cuda' or 'cuda:1'") from None
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = one_line(str(error), 120)
        raise ConfigError(f"device={device!s} cannot be used ({said}); use device='cpu'") from error
    return chosen


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | str | None:
    return dtype if dtype is None or dtype == "auto" else _floating("dtype", dtype)


def _floating(option: str, value: str | torch.dtype) -> torch.dtype:
    from tidekv_llm.weights.dtypes import floating_dtype  # torch: only once something is loaded

    return floating_dtype(option, value)


def _stored_dtype(config: PretrainedConfig, small: bool, device: torch.device) -> torch.dtype:
    """What is stored in where nobody says; of quantised weights what else there is, in two bytes."""
    import torch

    return torch.bfloat16 if small and device.type == "cpu" else stored_as(getattr(config, "dtype", None), device)


def _check_bits(bits: int, device: str | torch.device | None, source: ModelSource, options: Mapping[str, Any]) -> None:
    from tidekv_llm.weights.quantise import check_bits

    check_bits(bits)
    if bits == 16:
        return
    if source.kind == "gguf":
        raise ConfigError(f"weight_bits={bits}: a GGUF file has its own; leave weight_bits out")
    for name in ("device_map", "quantization_config"):
        if options.get(name) is not None:
            raise ConfigError(f"weight_bits={bits} and {name}: give one of them")
    kind = str(device or default_device()).split(":")[0]
    if kind != "cpu":
        raise ConfigError(f"weight_bits={bits} is for the CPU, not {kind}; use device='cpu' or a quantization_config")


# -- reading --------------------------------------------------------------------------------------------


def _location(source: ModelSource, hub_options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What from_pretrained takes first, and the options that go to config, tokenizer and weights alike."""
    if source.kind == "hub":
        assert source.repo_id is not None
        return source.repo_id, {**hub_options, **({"local_files_only": True} if source.local_only else {})}
    assert source.path is not None
    if source.kind == "gguf":
        return str(source.path.parent), {"gguf_file": source.path.name, "local_files_only": True}
    subfolder = {"subfolder": hub_options["subfolder"]} if "subfolder" in hub_options else {}
    return str(source.path), {"local_files_only": True, **subfolder}


def _read_config(where: str, options: Mapping[str, Any], given: PretrainedConfig | None) -> PretrainedConfig:
    """The configuration, of a family that transformers has built in."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if given is not None:
        return given
    if "gguf_file" not in options:
        raw, _ = transformers.PretrainedConfig.get_config_dict(where, **options)
        family = raw.get("model_type")
        if family not in CAUSAL:
            if raw.get("auto_map"):
                raise UnsafeWeightsError(
                    f"{where} needs code from its repository (auto_map, model_type={family!r}), which TideKV "
                    f"does not run; use a model whose family transformers has built in"
                )
            raise UnsupportedModelError(
                f"{where} has model_type={family!r}, which is no causal language model of transformers "
                f"{transformers.__version__}; use another model or a newer transformers"
            )
    return AutoConfig.from_pretrained(where, trust_remote_code=False, **options)


def _read_tokenizer(where: str, options: Mapping[str, Any], source: ModelSource) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except Exception as error:
        if source.kind == "hub" or "trust_remote_code" in str(error):
            raise
        raise ModelError(
            f"{source.name} has no readable tokenizer ({reason(error)}); put the model's tokenizer.json there"
        ) from error
    if source.kind == "gguf":
        assert source.path is not None
        from tidekv_llm.models.convert import correct_gguf_tokenizer

        correct_gguf_tokenizer(tokenizer, source.path)
    return tokenizer


def _read_weights(
    where: str,
    config: PretrainedConfig,
    source: ModelSource,
    device: torch.device | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if device is not None and device.type != "cpu":
        options["device_map"] = {"": str(device)}  # straight to the GPU, and the only way for quantised weights
    if "gguf_file" in options:
        options = {**_dense_gguf(options), **options}
    else:
        options["use_safetensors"] = True
    model, report = AutoModelForCausalLM.from_pretrained(
        where, config=config, trust_remote_code=False, output_loading_info=True, **options
    )
    _refuse_missing(report.get("missing_keys") or (), source)
    return _ready_for_inference(model)


def _read_quantised(
    where: str, config: PretrainedConfig, source: ModelSource, bits: int, options: dict[str, Any]
) -> PreTrainedModel:
    """Weights quantised as they are read, or after they were read where a checkpoint has names of its own."""
    from tidekv_llm.models.direct import SafetensorsFolder, can_read, empty_model, fill
    from tidekv_llm.weights.quantise import quantise_model

    folder = source.path
    if folder is not None and options["dtype"] != "auto":
        model, files = empty_model(config, options["dtype"]), SafetensorsFolder(folder)
        if can_read(model, files):
            return _ready_for_inference(fill(model, files, bits))
    import torch

    model = _read_weights(where, config, source, torch.device("cpu"), options)
    quantise_model(model, bits)
    return model


def _read_gguf(
    config: PretrainedConfig,
    source: ModelSource,
    device: torch.device | None,
    options: dict[str, Any],
    progress: Progress | None,
) -> tuple[PreTrainedModel | None, str | None]:
    """A GGUF file's weights as they lie in it; or None, and a note that says why they are unpacked."""
    if source.kind != "gguf" or source.path is None or "quantization_config" in options:
        return None, None
    if device is None or device.type != "cpu" or options["dtype"] == "auto":
        return None, None
    from tidekv_llm.models.direct import can_read, empty_model, fill
    from tidekv_llm.models.gguf_file import GgufFile

    model = empty_model(config, options["dtype"])
    file = GgufFile(source.path, model)
    why = file.uncovered or ("" if can_read(model, file) else "whose tensors have other names")
    if why:
        return None, f"a GGUF file {why} is unpacked: {format_bytes(source.path.stat().st_size)} of it became"

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(f"mapping tensor {done} of {total}", done / total)

    return _ready_for_inference(fill(model, file, 16, report)), None


def _ready_for_inference(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()
    model.requires_grad_(False)
    return model


def _dense_gguf(options: Mapping[str, Any]) -> dict[str, Any]:
    """Releases that can keep GGUF blocks packed must be told to unpack: packed ones compute in float32."""
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None or "quantization_config" in options else {"quantization_config": kind(dequantize=True)}


def _refuse_missing(missing: Any, source: ModelSource) -> None:
    """Transformers fills missing tensors with random numbers and goes on."""
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{source.name} lacks {len(names)} weight tensors ({', '.join(names[:3])}); "
            f"the checkpoint is incomplete or of another model: fetch it again"
        )


def _tokenizer_limit(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens, as the tokenizer claims; None if it claims nothing (transformers then stores 1e30)."""
    limit = getattr(tokenizer, "model_max_length", None)
    return int(limit) if limit is not None and limit < 10**9 else None


@contextmanager
def _one_line_errors(source: ModelSource) -> Iterator[None]:
    """Turn what transformers, torch and safetensors raise into one typed line."""
    try:
        yield
    except TideKVError:
        raise
    except Exception as error:
        raise _translate(error, source) from error


def _translate(error: Exception, source: ModelSource) -> TideKVError:
    import torch

    text = one_line(str(error))
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "not enough memory" in text:
        return MemoryLimitError(f"{source.name} does not fit into memory ({text}); use a smaller model or dtype")
    if "trust_remote_code" in text:
        return UnsafeWeightsError(
            f"{source.name} needs code from its repository, which TideKV does not run; use a model whose "
            f"family transformers has built in"
        )
    if "ignore_mismatched_sizes" in text:
        return ModelError(
            f"{source.name} has weights of other shapes than its config.json says; they do not fit together"
        )
    if source.kind == "hub" and isinstance(error, OSError):
        if "safetensors" in text:
            return UnsafeWeightsError(f"{source.name} has no safetensors weights on the hub; {CONVERT_REMEDY}")
        return ModelNotFoundError(f"{source.name} could not be fetched from the hub: {hub_reason(error)}")
    return ModelError(f"{source.name} cannot be loaded: {type(error).__name__}: {text or 'no message'}")
