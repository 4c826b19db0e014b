"""From the SmolLM2 GGUF file to a plain Hugging Face folder: bf16 safetensors, config, tokenizer.

Written out here instead of going through transformers' GGUF loader, because the result must not depend on
which transformers release wrote it: 5.12 reads the end token wrongly, and both 5.12 and 5.24 lose SmolLM2's
digit splitting (two line ends before a digit are one token, not two). The weights are bit for bit those of
that loader (tested).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 576, 30, 9, 3, 64
ROPE_THETA = 100000.0

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 49152,
}
GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
_TOKENIZER_CONFIG: dict[str, Any] = {
    **SPECIAL_TOKENS,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_GGUF_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
# Ends of a turn and of a message beside the end of sequence, under the names that tokenizers use for such.
_GGUF_ENDS = {
    "eot_token_id": "tokenizer.ggml.eot_token_id",
    "eom_token_id": "tokenizer.ggml.eom_token_id",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def convert_smollm2(gguf: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write the model in ``gguf`` to ``folder``, which exists and is empty.

    Args:
        gguf: the file, already checked to be the right one.
        folder: where to write.
        progress: called with the fraction done, 0.0 to 1.0.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    save_file(_weights(reader, progress), folder / "model.safetensors", metadata={"format": "pt"})
    _build_tokenizer(reader).save(str(folder / "tokenizer.json"))
    template = reader.fields["tokenizer.chat_template"].contents()
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    _write_json(folder / "config.json", CONFIG)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    _write_json(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)


def _weights(reader: Any, progress: Callable[[float], None]) -> dict[str, torch.Tensor]:
    """All tensors by their Hugging Face name, dense, bfloat16."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    weights = {}
    for index, entry in enumerate(reader.tensors):
        # float32; numpy's shape is already [out, in]
        values = np.require(dequantize(entry.data, entry.tensor_type), requirements="W")
        dense = torch.from_numpy(values).to(torch.bfloat16)
        if entry.name.endswith("attn_q.weight"):
            dense = _unpermute(dense, HEADS)
        elif entry.name.endswith("attn_k.weight"):
            dense = _unpermute(dense, KV_HEADS)
        weights[hf_name(entry.name)] = dense.contiguous()
        progress((index + 1) / len(reader.tensors))
    return weights


def hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in _WHOLE:
        return _WHOLE[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind}"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of rotary pairs: rows (pair, half) of each head -> (half, pair)."""
    out_features, in_features = weight.shape
    pairs = weight.view(heads, out_features // heads // 2, 2, in_features)  # [heads, pairs, 2, in]
    return pairs.transpose(1, 2).reshape(out_features, in_features)


def _build_tokenizer(reader: Any) -> Tokenizer:
    """Byte-level BPE with digits one by one, as SmolLM2 was trained (``tokenizer.ggml.pre = smollm``)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ", 1)) for pair in reader.fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _smollm_splitting()
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def correct_gguf_tokenizer(tokenizer: PreTrainedTokenizerBase, gguf: Path) -> None:
    """Set what transformers' GGUF reader loses: special tokens (5.12), ends of a turn, SmolLM's digit splitting."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    for attribute, key in _GGUF_SPECIAL.items():
        if key in fields:
            token = tokenizer.convert_ids_to_tokens(int(fields[key].contents()))
            if isinstance(token, str):
                setattr(tokenizer, attribute, token)
    for attribute, key in _GGUF_ENDS.items():
        if key in fields:
            setattr(tokenizer, attribute, int(fields[key].contents()))
    pre = fields.get("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = _smollm_splitting()


def _smollm_splitting() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), "utf-8")
