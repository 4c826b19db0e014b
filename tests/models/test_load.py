"""Loading: what is accepted, what is refused and with which words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.support import save_tiny_llama, write_tiny_gguf
from tidekv_llm import TideKV
from tidekv_llm.errors import (
    Cancelled,
    ConfigError,
    ModelError,
    ModelNotFoundError,
    UnsafeWeightsError,
    UnsupportedModelError,
)
from tidekv_llm.hardware import default_dtype
from tidekv_llm.models import embedded, load, load_tokenizer, resolve
from tidekv_llm.models.loading import only_our_progress
from tidekv_llm.models.sources import ModelSource
from tidekv_llm.models.window import apply_window

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path / "tiny")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to resolve a host name fails at once."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


# -- what loads ---------------------------------------------------------------------------------------------


def test_folder_loads_ready_for_inference(tiny: Path) -> None:
    loaded = load(tiny, dtype="float32", device="cpu")
    assert loaded.context_window == 128
    assert loaded.rope_note is None
    assert loaded.source.kind == "folder"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.dtype == torch.float32
    ids = loaded.tokenizer("w3 w5", return_tensors="pt").input_ids
    assert loaded.model(ids).logits.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (None, default_dtype(torch.device("cpu"))),
        ("bf16", torch.bfloat16),
        ("auto", torch.float32),
        (torch.float16, torch.float16),
        ("torch.float32", torch.float32),
    ],
)
def test_dtype(tiny: Path, dtype: Any, expected: torch.dtype) -> None:
    assert load(tiny, dtype=dtype, device="cpu").model.dtype == expected


def test_tied_weights_are_not_reported_missing(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    model = load(folder, device="cpu").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_options_pass_through(tiny: Path) -> None:
    loaded = load(tiny, device_map={"": "cpu"}, attn_implementation="eager")
    assert loaded.model.config._attn_implementation == "eager"


def test_gguf_file_loads_dense_with_the_tokens_of_its_header(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load(path, dtype="float32", device="cpu")
    assert loaded.source.kind == "gguf"
    assert resolve(tmp_path).path == path, "a folder with one GGUF file means that file"
    assert loaded.context_window == 64
    assert all(parameter.is_floating_point() for parameter in loaded.model.parameters())
    assert (loaded.tokenizer.bos_token, loaded.tokenizer.eos_token) == ("<s>", "</s>")
    assert loaded.tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    ids = loaded.tokenizer("ab", return_tensors="pt").input_ids
    assert loaded.model(ids).logits.isfinite().all()


@pytest.mark.parametrize("end_of_turn", [None, 7])
def test_the_end_of_turn_in_a_gguf_header_is_a_stop(tmp_path: Path, end_of_turn: int | None) -> None:
    """Its end of sequence is another token, which a chat model seldom writes: the answer ran on to its full length."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", end_of_turn=end_of_turn)
    with TideKV.from_pretrained(path, dtype="float32", device="cpu") as llm:
        assert llm._open().stop_ids == {2, end_of_turn} - {None}


def test_a_gguf_file_is_told_by_our_progress_and_draws_no_bar_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, told = write_tiny_gguf(tmp_path / "tiny.gguf"), []
    load(path, dtype="float32", device="cpu", progress=lambda message, fraction: told.append((message, fraction)))
    assert told[0][0].startswith("mapping tensor 1 of ")
    assert [fraction for _, fraction in told] == sorted({fraction for _, fraction in told})
    assert told[-1][1] == 1.0
    load(path, dtype="float32", device="cpu")  # nobody listens
    load_tokenizer(path)
    assert "%|" not in capfd.readouterr().err


def test_a_gguf_load_can_be_cancelled_by_its_progress_and_the_library_gets_its_bar_back(tmp_path: Path) -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    def stop(message: str, fraction: float) -> None:
        raise Cancelled("enough")

    path, before = write_tiny_gguf(tmp_path / "tiny.gguf"), gguf_reader.tqdm
    with pytest.raises(Cancelled, match="enough"):
        load(path, dtype="float32", device="cpu", progress=stop)
    assert gguf_reader.tqdm is before


def test_bars_of_other_threads_and_later_ones_are_not_ours(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    def draw() -> None:
        assert list(gguf_reader.tqdm([1, 2], desc="theirs")) == [1, 2]

    with only_our_progress(None):
        draw()
        assert "theirs" not in capfd.readouterr().err
        other = threading.Thread(target=draw)
        other.start()
        other.join()
        assert "theirs" in capfd.readouterr().err
    draw()
    assert "theirs" in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


# -- what is refused ----------------------------------------------------------------------------------------


def test_pickle_weights_are_refused(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(UnsafeWeightsError, match=r"pytorch_model\.bin.*convert it to safetensors") as caught:
        load(tiny)
    one_line(caught)
    with pytest.raises(UnsafeWeightsError):
        load(tiny / "pytorch_model.bin")


def test_pickle_beside_safetensors_is_not_read(tiny: Path) -> None:
    (tiny / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert load(tiny, device="cpu").context_window == 128


def test_remote_code_is_refused(tiny: Path) -> None:
    with pytest.raises(UnsafeWeightsError, match="trust_remote_code=True would run code"):
        load(tiny, trust_remote_code=True)
    with pytest.raises(UnsafeWeightsError, match="use_safetensors=False"):
        load(tiny, use_safetensors=False)
    assert load(tiny, trust_remote_code=False, device="cpu").context_window == 128
    (tiny / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(tiny, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(UnsafeWeightsError, match="auto_map") as caught:
        load(tiny)
    one_line(caught)


def test_family_without_causal_model_is_refused(tiny: Path) -> None:
    edit_config(tiny, model_type="t5")
    with pytest.raises(UnsupportedModelError, match=r"'t5'.*newer transformers"):
        load(tiny)


def test_missing_tensors_are_not_filled_with_noise(tiny: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight tensors \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load(tiny, device="cpu")


def test_weights_of_another_model_are_refused(tiny: Path) -> None:
    edit_config(tiny, intermediate_size=48)
    with pytest.raises(ModelError, match=r"other shapes than its config\.json says"):
        load(tiny, device="cpu")


def test_damaged_files_give_one_line(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(tiny, device="cpu")
    one_line(caught)
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(tiny, device="cpu")
    one_line(caught)


def test_folder_without_tokenizer_is_refused(tiny: Path) -> None:
    for file in tiny.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError) as caught:
        load(tiny, device="cpu")
    assert "tokenizer" in one_line(caught)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": torch.int64},
        {"device": "nowhere"},
        {"device": "cpu", "device_map": "auto"},
        {"context_window": 0},
        {"context_window": 1.5},
        {"context_window": 129},
    ],
    ids=str,
)
def test_impossible_options(tiny: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tiny, **options)
    one_line(caught)


def test_unknown_transformers_option_is_an_error(tiny: Path) -> None:
    with pytest.raises(ModelError, match="no_such_option"):
        load(tiny, device="cpu", no_such_option=1)


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model", "./no/such/folder", "spaces in it", ""])
def test_unknown_name_says_what_was_tried(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load(name)
    text = one_line(caught)
    assert embedded.ALIAS in text
    if name:
        assert name in text
        assert "local path" in text
        assert "hub" in text


def test_offline_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from tidekv_llm.models import resolve; resolve('nobody/nothing')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert "offline mode is on (HF_HUB_OFFLINE)" in done.stderr.splitlines()[-1]


def test_things_that_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
        load(tmp_path / "note.txt")
    with pytest.raises(ModelNotFoundError, match=r"without config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        load(tmp_path)


class FakeHubInfo:
    def __init__(self, *files: str) -> None:
        self.siblings = [type("File", (), {"rfilename": file}) for file in files]


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (("config.json", "model.safetensors"), None),
        (("config.json", "pytorch_model.bin", "model.safetensors"), None),
        (("config.json", "pytorch_model.bin"), UnsafeWeightsError),
        (("README.md", "model.gguf"), ModelNotFoundError),
        (("config.json",), ModelNotFoundError),
    ],
)
def test_hub_repository_is_judged_before_its_download(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], error: type[Exception] | None
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, **options: FakeHubInfo(*files))
    if error is None:
        assert resolve("some/model") == ModelSource(kind="hub", name="some/model", repo_id="some/model")
    else:
        with pytest.raises(error):
            resolve("some/model")


def test_hub_model_in_the_local_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    save_tiny_llama(snapshot)
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    loaded = load("some/model", cache_dir=tmp_path, device="cpu")
    assert loaded.source == ModelSource(kind="hub", name="some/model", repo_id="some/model", local_only=True)
    assert loaded.context_window == 128


# -- context window -----------------------------------------------------------------------------------------

ALIAS_SOURCE = ModelSource(kind="alias", name=embedded.ALIAS)


def smollm_config() -> Any:
    from transformers import LlamaConfig

    from tidekv_llm.models.convert import CONFIG

    return LlamaConfig(**CONFIG)


@pytest.mark.parametrize(("wanted", "window"), [(None, 8192), (100, 100), (8192, 8192)])
def test_window_within_training_leaves_positions_alone(wanted: int | None, window: int) -> None:
    config = smollm_config()
    assert apply_window(config, wanted, ALIAS_SOURCE) == (window, None)
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("wanted", [8193, 32768])
def test_longer_window_switches_yarn_on_and_changes_the_rotation(wanted: int) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = smollm_config()
    before = LlamaRotaryEmbedding(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        window, note = apply_window(config, wanted, ALIAS_SOURCE)
        after = LlamaRotaryEmbedding(config)
    assert window == wanted
    assert note is not None
    assert "YaRN" in note
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    }
    # The slowest rotation is slowed down four times, the fastest is left alone.
    assert after.inv_freq[-1].item() == pytest.approx(before.inv_freq[-1].item() / 4)
    assert after.inv_freq[0].item() == pytest.approx(before.inv_freq[0].item())
    assert after.attention_scaling > 1.0


def test_window_beyond_yarn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"32769.*8192 tokens as trained.*32768 with YaRN"):
        apply_window(smollm_config(), 32769, ALIAS_SOURCE)


def test_other_models_are_not_stretched(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"context_window=129 is more than the 128 tokens.*config\.json"):
        load(tiny, context_window=129, device="cpu")
    assert load(tiny, context_window=64, device="cpu").context_window == 64


def test_yarn_in_the_config_counts(tiny: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    edit_config(tiny, rope_parameters=rope)
    assert load(tiny, device="cpu").context_window == 256


# -- the real one -------------------------------------------------------------------------------------------


def test_embedded_model_answers(embedded_model_path: Path) -> None:
    loaded = load(embedded.ALIAS, device="cpu")
    assert loaded.source.path == embedded_model_path
    assert loaded.context_window == 8192
    tokenizer = loaded.tokenizer
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 0)
    assert loaded.model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    for text in ("a\n\n1 2024  33", "Grüße, 漢字 \t end "):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt")
    answer = loaded.model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[inputs.input_ids.shape[1] :])
    assert answer[-1] == 2, "ends by itself"


def test_embedded_model_stretched_says_so_in_the_log(
    embedded_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(embedded.ALIAS, device="cpu", context_window=20_000)
    assert loaded.context_window == 20_000
    assert loaded.model.config.rope_parameters["rope_type"] == "yarn"
    assert loaded.rope_note is not None
    assert sum(loaded.rope_note in record.getMessage() for record in caplog.records) == 1


def test_import_and_listing_need_no_torch() -> None:
    code = (
        "import sys, tidekv_llm.models as m, tidekv_llm.cli.doctor; m.list_models(); m.resolve('smollm2-135m');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
