"""Tiny random models of every supported family, float32, deterministic."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
WINDOW = 8

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW},
    "phi3": {},
    "smollm3": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.5},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "glm4": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "llama4_text": {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 4096},
    "gpt_oss": {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}

# What has no fast kernel for its attention in transformers; the reference forward must be the exact one.
EAGER = ("gemma2", "gpt_oss")


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of a family; larger weights than usual, so that attention is not uniform."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**BASE, **FAMILIES[family], **changes})
    attention = "eager" if family in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            elif "sinks" in name:
                parameter.normal_(0.0, 1.0)
    return model.eval()


def random_prompt(length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    """Token ids from 3 on (0 to 2 are special)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()
