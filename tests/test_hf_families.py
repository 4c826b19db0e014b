"""Layer by layer through our attention gives what the model's own forward gives, in every family."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tiny_models import BASE, FAMILIES, WINDOW, random_prompt, tiny_model
from tidekv_llm import PrefillConfig, TideKV
from tidekv_llm.errors import ContextOverflowError, UnsupportedModelError
from tidekv_llm.hf import Decoder

S = 45  # several windows of the sliding layers
MIXED = {
    "gemma3_text": ["sliding_attention", "full_attention", "sliding_attention"],
    "qwen3": ["full_attention", "sliding_attention", "full_attention"],
}
CASES = {
    **{family: functools.partial(tiny_model, family) for family in FAMILIES},
    "gemma3_text mixed": functools.partial(tiny_model, "gemma3_text", layer_types=MIXED["gemma3_text"]),
    "qwen3 mixed": functools.partial(
        tiny_model, "qwen3", layer_types=MIXED["qwen3"], sliding_window=WINDOW, use_sliding_window=True
    ),
    "llama dynamic rope": functools.partial(
        tiny_model,
        "llama",
        max_position_embeddings=41,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ),
}


@functools.cache
def engine_of(case: str) -> TideKV:
    engine = TideKV(CASES[case](), context_window=4096)
    engine.model.eval()
    return engine


@functools.cache
def own_forward(case: str) -> tuple[Tensor, Tensor]:
    """The model's own one-shot logits [vocab] and last hidden states [S, d_model]."""
    with torch.no_grad():
        ids = torch.tensor([random_prompt(S)])
        output = engine_of(case).model(ids, use_cache=False, output_hidden_states=True)
    return output.logits[0, -1].float(), output.hidden_states[-1][0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunk_size", [1, 7, S, S + 1])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_models_own_at_any_chunk_size(case: str, chunk_size: int) -> None:
    engine = engine_of(case).with_prefill(chunk_size=chunk_size)
    assert relative_error(engine.prefill(random_prompt(S)).logits, own_forward(case)[0]) < 1e-5


@pytest.mark.parametrize("selector", ["snapkv", "recent"])
@pytest.mark.parametrize("case", CASES)
def test_eviction_does_not_change_the_prefills_logits(case: str, selector: str) -> None:
    engine = engine_of(case).with_prefill(chunk_size=7, kept_tokens=12, window_size=4, sinks=2, selector=selector)
    prefilled = engine.prefill(random_prompt(S))
    assert prefilled.cache.kept_tokens <= 12
    assert relative_error(prefilled.logits, own_forward(case)[0]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_the_models_own(case: str) -> None:
    engine = engine_of(case).with_prefill(chunk_size=7)
    prefilled = engine.prefill(random_prompt(S), all_outputs=True)
    hidden = Decoder(engine.model).backbone.norm(prefilled.hidden).detach()
    assert hidden.shape == (S, 32)
    assert relative_error(hidden, own_forward(case)[1]) < 1e-5
    last_only = engine.prefill(random_prompt(S))
    assert last_only.hidden.shape == (1, 32)
    torch.testing.assert_close(last_only.hidden, prefilled.hidden[-1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["mistral", "gemma2", "gemma3_text mixed", "qwen3 mixed", "gpt_oss", "exaone4"])
def test_sliding_layers_keep_their_window_and_full_layers_the_budget(case: str) -> None:
    engine = engine_of(case).with_prefill(chunk_size=7, kept_tokens=12, window_size=4, sinks=2)
    cache = engine.prefill(random_prompt(S)).cache
    kinds = Decoder(engine.model).layer_types
    assert "sliding_attention" in kinds
    for layer, kind in enumerate(kinds):
        positions = cache.positions(layer, 1).tolist()
        if kind == "sliding_attention":
            assert positions == list(range(S - WINDOW, S))
        else:
            assert len(positions) == 12


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """What a user could notice: the config, where each module keeps it, its mode and its hooks."""
    return {
        "config": model.config.to_json_string(),
        "attention": {
            name: module.config._attn_implementation
            for name, module in model.named_modules()
            if hasattr(module, "config")
        },
        "training": [module.training for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3_text mixed", "gpt_oss"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_users_model_is_left_as_it_was(case: str, attention: str) -> None:
    model = CASES[case]()
    if case != "gpt_oss":
        model.set_attn_implementation(attention)
    ids = torch.tensor([random_prompt(20)])
    before, text = settings(model), model.generate(ids, max_new_tokens=6, do_sample=False)
    engine = TideKV(model, prefill=PrefillConfig(chunk_size=7, kept_tokens=12, window_size=4, sinks=2))
    engine.generate(random_prompt(S), max_new_tokens=4)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), text)
    engine.close()
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), text)
    assert settings(model) == before


def test_the_attention_setting_comes_back_after_an_error() -> None:
    model = tiny_model()
    engine = TideKV(model)

    def fail(progress: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.prefill(random_prompt(20), progress=fail)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_check(dtype: torch.dtype) -> None:
    engine = TideKV(tiny_model().to(dtype))
    prefilled = engine.prefill(random_prompt(S))
    assert prefilled.logits.dtype == torch.float32
    assert prefilled.cache.keys(0, 0).dtype == dtype


def test_gradients_of_the_users_model_are_not_recorded() -> None:
    prefilled = TideKV(tiny_model()).prefill(random_prompt(20), all_outputs=True)
    assert not prefilled.logits.requires_grad
    assert not prefilled.hidden.requires_grad
    assert not prefilled.cache.keys(0, 0).requires_grad


def test_llama4_prompts_beyond_the_attention_chunk_are_refused() -> None:
    engine = TideKV(tiny_model("llama4_text", attention_chunk_size=64))
    engine.prefill(random_prompt(64))
    with pytest.raises(ContextOverflowError, match="65 prompt tokens exceed the 64 of this family's chunked"):
        engine.prefill(random_prompt(65))


# --- what is refused -----------------------------------------------------------------------------------


def gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def opt() -> PreTrainedModel:
    config = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=48,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    return transformers.OPTForCausalLM(config)


def t5() -> PreTrainedModel:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def mamba() -> PreTrainedModel:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    )


def bert() -> PreTrainedModel:
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        is_decoder=True,
    )
    return transformers.BertLMHeadModel(config)


def headless() -> PreTrainedModel:
    return tiny_model().model


def gemma3n() -> PreTrainedModel:
    config = transformers.AutoConfig.for_model(
        "gemma3n_text",
        **{**BASE, "head_dim": 8, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "laurel_rank": 4},
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        intermediate_size_per_layer=48,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def shared_kv() -> PreTrainedModel:
    model = tiny_model()
    model.config.num_kv_shared_layers = 1
    return model


def unknown_layer_type() -> PreTrainedModel:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    return model


class IgnoresKwargs(nn.Module):
    """A decoder layer that takes our arguments and forgets those it does not know."""

    def __init__(self, layer: nn.Module, argument: str) -> None:
        super().__init__()
        self.layer, self.argument = layer, argument

    def call(self, hidden: Tensor, cache: Any, **known: Any) -> Any:
        known.pop("tidekv", None)
        return self.layer(hidden, **known, **{self.argument: cache})


class IgnoresNew(IgnoresKwargs):
    def forward(self, hidden: Tensor, cache: Any = None, **known: Any) -> Any:
        return self.call(hidden, cache, **known)


class IgnoresOld(IgnoresKwargs):
    def forward(self, hidden: Tensor, past_key_values: Any = None, **known: Any) -> Any:
        return self.call(hidden, past_key_values, **known)


def layers_ignore_kwargs() -> PreTrainedModel:
    model = tiny_model()
    argument = Decoder(model)._cache_argument
    kind = IgnoresNew if argument == "cache" else IgnoresOld
    model.model.layers = nn.ModuleList(kind(layer, argument) for layer in model.model.layers)
    return model


def forgotten_multiplier() -> PreTrainedModel:
    model = tiny_model()
    own = model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        output = own(*arguments, **options)
        output.logits = output.logits * 1.01
        return output

    model.forward = forward  # type: ignore[method-assign]
    return model


def bidirectional() -> PreTrainedModel:
    """A model whose own forward is not what causal layers give."""
    model = tiny_model()
    own = model.forward

    def forward(ids: Tensor, **options: Any) -> Any:
        length = ids.shape[1]
        mask = torch.zeros(1, 1, length, length)
        return own(ids, attention_mask=mask, **options)

    model.forward = forward  # type: ignore[method-assign,assignment]
    return model


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gpt2": (gpt2, "GPT2LMHeadModel lacks .*learned positions"),
    "opt": (opt, "OPTForCausalLM lacks"),
    "t5": (t5, "T5ForConditionalGeneration lacks"),
    "mamba": (mamba, "MambaForCausalLM lacks"),
    "bert": (bert, "BertLMHeadModel lacks"),
    "no head": (headless, "LlamaModel has no output head"),
    "gemma3n": (gemma3n, "share another layer's KV"),
    "shared kv": (shared_kv, "share another layer's KV"),
    "layer type": (unknown_layer_type, "layer type 'linear_attention' is unsupported"),
    "ignored kwargs": (layers_ignore_kwargs, "does not pass keyword arguments on"),
    "multiplier": (forgotten_multiplier, "differ from the model's own by 0.0"),
    "bidirectional": (bidirectional, "differ from the model's own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_family_is_refused_in_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = REFUSED[name]
    caplog.set_level(logging.CRITICAL)
    model = make().eval()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        TideKV(model)
    assert "\n" not in str(caught.value)


def test_a_model_in_training_mode_with_dropout_is_told_to_leave_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"is in training mode.* call model\.eval\(\) first"):
        TideKV(tiny_model(attention_dropout=0.5).train())
