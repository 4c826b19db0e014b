"""From a name to a source: alias first, then a local path, then the Hugging Face hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidekv_llm.errors import ModelNotFoundError, UnsafeWeightsError
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
    """

    kind: Kind
    name: str
    path: Path | None = None
    repo_id: str | None = None


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
    size = embedded.tree_bytes(folder) if cached else embedded.WHEEL.wheel_bytes
    return [
        ModelInfo(
            alias=embedded.ALIAS, description=embedded.DESCRIPTION, cached=cached, path=folder, bytes=size
        )
    ]


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
        revision, token, cache_dir: passed to the hub; the hub is asked only if nothing local fits.

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
            raise UnsafeWeightsError(
                f"{name} is a pickle file, which runs code when loaded; {CONVERT_REMEDY}"
            )
        raise ModelNotFoundError(
            f"{name} is a file but not GGUF; give a .gguf file or the folder of config.json"
        )
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
        file.name
        for file in folder.iterdir()
        if file.suffix in PICKLE_SUFFIXES and file.name not in _NOT_WEIGHTS
    )
    if pickles:
        raise UnsafeWeightsError(
            f"{folder} has only pickle weights ({', '.join(pickles[:3])}), which run code when loaded; "
            f"{CONVERT_REMEDY}"
        )
    if not may_be_empty:
        raise ModelNotFoundError(f"{folder} has config.json but no *.safetensors weights")


def _hub(
    name: str, *, revision: str | None, token: str | bool | None, cache_dir: str | os.PathLike[str] | None
) -> ModelSource:
    """A hub id whose config.json is in the local hub cache or can be fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    for local_only in (True, False):
        try:
            hf_hub_download(
                name,
                "config.json",
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_only,
            )
        except HFValidationError:
            raise _not_found(name, "not a valid hub id") from None
        except Exception as error:
            if not local_only:
                raise _not_found(name, hub_reason(error)) from error
        else:
            break
    return ModelSource(kind="hub", name=name, repo_id=name)


def _not_found(name: str, reason: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"no model {name!r}: not an alias ({embedded.ALIAS}), no such local path, "
        f"and the Hugging Face hub: {reason}"
    )


_HUB_REASONS = {
    "GatedRepoError": "access is gated; ask for it on the model's page and run 'hf auth login'",
    "RepositoryNotFoundError": "no such repository, or a private one (run 'hf auth login')",
    "RevisionNotFoundError": "no such revision",
    "EntryNotFoundError": "the repository has no config.json; for a GGUF repository pass the downloaded file",
    "RemoteEntryNotFoundError": "the repository has no config.json; for a GGUF repository pass the downloaded file",
    "OfflineModeIsEnabled": "offline mode is on (HF_HUB_OFFLINE)",
    "LocalEntryNotFoundError": "cannot be reached, and the model is not in its local cache",
}


def hub_reason(error: BaseException) -> str:
    """The hub's complaint in a few words."""
    seen: BaseException | None = error
    while seen is not None:  # LocalEntryNotFoundError hides the offline switch as its cause
        if type(seen).__name__ == "OfflineModeIsEnabled":
            return _HUB_REASONS["OfflineModeIsEnabled"]
        seen = seen.__cause__
    return _HUB_REASONS.get(type(error).__name__) or embedded.shorten(f"{type(error).__name__}: {error}", 160)
