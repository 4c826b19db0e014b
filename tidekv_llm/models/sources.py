"""From a name to a source: alias first, then a local path, then the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidekv_llm.errors import ModelNotFoundError, UnsafeWeightsError, reason
from tidekv_llm.files import tree_bytes
from tidekv_llm.models import embedded

Kind = Literal["alias", "folder", "gguf", "hub"]

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What a name stands for.

    Attributes:
        kind: where the weights lie.
        name: as the user gave it.
        path: the local folder or file; None for a hub id, and for an alias that is not cached yet.
        repo_id: the hub id, None for everything else.
        local_only: the hub cannot be asked, but its local cache has the model.
    """

    kind: Kind
    name: str
    path: Path | None = None
    repo_id: str | None = None
    local_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """One line of ``tidekv models``.

    Attributes:
        alias: the name to load it by.
        description: what it is, one line.
        cached: whether it is here, converted and undamaged.
        path: where it lies or will lie.
        bytes: on disk now if cached, else what the download takes.
    """

    alias: str
    description: str
    cached: bool
    path: Path
    bytes: int


def list_models() -> list[ModelInfo]:
    """The models with an alias; no network call."""
    folder = embedded.embedded_folder()
    cached = embedded.is_cached(folder)
    size = tree_bytes(folder) if cached else embedded.WHEEL.wheel_bytes
    return [ModelInfo(alias=embedded.ALIAS, description=embedded.DESCRIPTION, cached=cached, path=folder, bytes=size)]


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ModelSource:
    """Say what a name stands for.

    Args:
        name_or_path: an alias, a folder, a ``.gguf`` file, or a hub id (``model`` or ``organisation/model``).
        revision: of the hub repository; the hub is asked only if nothing local fits.
        token: for the hub; default: the one stored by ``hf auth login``.
        cache_dir: the local hub cache.

    Raises:
        ModelNotFoundError: nothing by that name; the message says what was tried.
        UnsafeWeightsError: a folder whose only weights are pickle files.
    """
    name = os.fspath(name_or_path).strip()
    if not name:
        raise ModelNotFoundError(f"the model name is empty; give {embedded.ALIAS!r}, a path or a hub id")
    if name == embedded.ALIAS:
        folder = embedded.embedded_folder()
        return ModelSource(kind="alias", name=name, path=folder if embedded.is_cached(folder) else None)
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path.resolve())
    return _hub(name, revision=revision, token=token, cache_dir=cache_dir)


def _local(name: str, path: Path) -> ModelSource:
    if path.is_file():
        if is_gguf(path):
            return ModelSource(kind="gguf", name=name, path=path)
        if path.suffix in PICKLE_SUFFIXES:
            raise UnsafeWeightsError(f"{name} is a pickle file, which runs code as it loads; {CONVERT_REMEDY}")
        raise ModelNotFoundError(f"{name} is not a GGUF file; give one, or the folder of config.json")
    if (path / "config.json").is_file():
        require_safetensors(path)
        return ModelSource(kind="folder", name=name, path=path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(kind="gguf", name=name, path=ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:4])
        raise ModelNotFoundError(f"{name} has {len(ggufs)} GGUF files ({names}); name the one to load")
    require_safetensors(path, may_be_empty=True)
    raise ModelNotFoundError(f"{name} is a folder without config.json or a .gguf file; it is not a model")


CONVERT_REMEDY = "convert it to safetensors (model.save_pretrained in a place where running its code is safe)"


def is_gguf(path: Path) -> bool:
    """Whether a file starts with the GGUF magic number."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def require_safetensors(folder: Path, *, may_be_empty: bool = False) -> None:
    """Refuse a folder without safetensors weights.

    Raises:
        UnsafeWeightsError: it has pickle weights only.
        ModelNotFoundError: it has no weights at all (unless ``may_be_empty``).
    """
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(
        file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES and file.name not in _NOT_WEIGHTS
    )
    if pickles:
        raise UnsafeWeightsError(
            f"{folder} has only pickle weights ({', '.join(pickles[:3])}), which run code when loaded; {CONVERT_REMEDY}"
        )
    if not may_be_empty:
        raise ModelNotFoundError(f"{folder} has config.json but no *.safetensors weights")


def _hub(
    name: str, *, revision: str | None, token: str | bool | None, cache_dir: str | os.PathLike[str] | None
) -> ModelSource:
    """A hub id, confirmed by one request, or by the local hub cache if the hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        # Not hf_hub_download: without a network it retries for 23 seconds before it says so.
        found = HfApi(token=token).model_info(name, revision=revision, timeout=_HUB_TIMEOUT_SECONDS)
    except HFValidationError:
        raise _not_found(name, "not a valid hub id") from None
    except Exception as error:
        try:
            _cached_config(name, revision, cache_dir)
        except Exception:
            raise _not_found(name, hub_reason(error)) from error
        return ModelSource(kind="hub", name=name, repo_id=name, local_only=True)
    _check_hub_files(name, {file.rfilename for file in found.siblings or ()})
    return ModelSource(kind="hub", name=name, repo_id=name)


def _cached_config(name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None) -> None:
    """Raise unless the local hub cache has this model's config.json; no network call."""
    from huggingface_hub import hf_hub_download

    folder = None if cache_dir is None else Path(cache_dir)
    hf_hub_download(name, "config.json", revision=revision, cache_dir=folder, local_files_only=True)


def _check_hub_files(name: str, files: Collection[str]) -> None:
    """Refuse before the download what :func:`require_safetensors` would refuse after it."""
    if not files or any(file.endswith(".safetensors") for file in files):
        return
    if any(file.endswith(PICKLE_SUFFIXES) for file in files):
        raise UnsafeWeightsError(f"{name} has only pickle weights on the hub; {CONVERT_REMEDY}")
    if any(file.endswith(".gguf") for file in files):
        raise ModelNotFoundError(f"{name} has only GGUF files on the hub; download one and give its path")
    raise ModelNotFoundError(f"{name} is on the hub but has no *.safetensors weights")


def _not_found(name: str, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"no model {name!r}: not an alias ({embedded.ALIAS}), no such local path, and the Hugging Face hub: {reason}"
    )


_HUB_TIMEOUT_SECONDS = 10.0
_NOT_CACHED = "and the model is not in its local cache; check the name, or go online once to fetch it"
_HUB_REASONS = {
    "GatedRepoError": "access is gated; ask for it on the model's page and run 'hf auth login'",
    "RepositoryNotFoundError": "no such repository, or a private one (run 'hf auth login')",
    "RevisionNotFoundError": "no such revision",
    "OfflineModeIsEnabled": "offline mode is on (HF_HUB_OFFLINE)",
    "LocalEntryNotFoundError": f"cannot be reached, {_NOT_CACHED}",
    "ConnectError": f"cannot be reached, {_NOT_CACHED}",
    "ConnectTimeout": f"cannot be reached, {_NOT_CACHED}",
    "ConnectionError": f"cannot be reached, {_NOT_CACHED}",
    "ReadTimeout": f"does not answer, {_NOT_CACHED}",
}


def hub_reason(error: BaseException) -> str:
    """The hub's complaint in a few words; transformers hides it as the cause of its own error."""
    cause: BaseException | None = error
    while cause is not None:
        known = _HUB_REASONS.get(type(cause).__name__)
        if known:
            return known
        cause = cause.__cause__ or cause.__context__
    return reason(error)
