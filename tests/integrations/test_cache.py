"""An answer cache tells apart whatever changes an answer: weights, window, template, options, documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document

from langchain_tidekv import ChatTideKV, TideKVLLM, stuff_documents_chain
from tests.integrations.tiny import save_tiny_chat, tiny_tokenizer
from tests.tiny_models import tiny_model
from tidekv_llm import PrefillConfig, TideKV

KINDS = pytest.mark.parametrize("kind", [TideKVLLM, ChatTideKV])
PROMPT = "Tell me about the sea."


def engine(seed: int = 0, **options: Any) -> TideKV:
    """An engine with the default name, which many others have too."""
    import torch

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = options.pop("chat_template", tokenizer.chat_template)
    torch.manual_seed(seed)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed * 0.01 * torch.randn_like(parameter))
    return TideKV(model, tokenizer, **options)


class Counted(InMemoryCache):
    """Counts what was answered from it."""

    hits = 0

    def lookup(self, prompt: str, llm_string: str) -> Any:
        found = super().lookup(prompt, llm_string)
        self.hits += found is not None
        return found


@pytest.fixture
def cache() -> Counted:
    return Counted()


def text_of(answer: Any) -> str:
    return str(getattr(answer, "text", answer))


@KINDS
def test_engines_with_one_name_have_keys_of_their_own(kind: Any, cache: Counted) -> None:
    engines = [engine(seed) for seed in (0, 1)]
    assert engines[0].name == engines[1].name
    models = [kind(engine=one, max_tokens=6, cache=cache) for one in engines]
    answers = [text_of(model.invoke(PROMPT)) for model in models]
    asked = [{"role": "user", "content": PROMPT}]
    assert answers == [one.generate(asked, max_new_tokens=6).text for one in engines]
    assert cache.hits == 0
    models[0].invoke(PROMPT)
    assert cache.hits == 1


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"context_window": 64},
        {"prefill": PrefillConfig(kept_tokens=64)},
        {"chat_template": "{% for m in messages %}{{ m['content'] }}!{% endfor %}"},
    ],
    ids=str,
)
def test_what_changes_an_answer_changes_the_key(kind: Any, options: dict[str, Any], cache: Counted) -> None:
    first, other = engine(), engine(**options)
    kind(engine=first, max_tokens=4, cache=cache).invoke(PROMPT)
    kind(engine=other, max_tokens=4, cache=cache).invoke(PROMPT)
    assert cache.hits == 0
    kind(engine=engine(), max_tokens=4, cache=cache).invoke(PROMPT)  # the same weights, made again
    assert cache.hits == 1


OPTIONS: list[dict[str, Any]] = [
    *({"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"seed": 7}, {"stop": ["z"]}, {"max_tokens": 5}),
    *({"kept_tokens": 64}, {"device": "cpu"}, {"dtype": "float32"}, {"context_window": 1000}),
    {"chat_template_kwargs": {"thinking": False}},
]


@KINDS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_of_an_object_is_in_the_key(kind: Any, tiny: str, options: dict[str, Any], cache: Counted) -> None:
    for given in ({}, options):
        with kind(model=tiny, cache=cache, **{"max_tokens": 4, **given}) as llm:
            llm.invoke(PROMPT)
    assert cache.hits == 0


@KINDS
@pytest.mark.parametrize("options", OPTIONS[:6], ids=str)
def test_every_option_of_a_call_is_in_the_key(kind: Any, tiny: str, options: dict[str, Any], cache: Counted) -> None:
    with kind(model=tiny, cache=cache, max_tokens=4) as llm:
        llm.invoke(PROMPT)
        llm.invoke(PROMPT, **options)
        assert cache.hits == 0
        llm.invoke(PROMPT, **options)
        assert cache.hits == 1


@KINDS
def test_stops_of_the_object_and_of_the_call_are_both_in_the_key(kind: Any, tiny: str, cache: Counted) -> None:
    with kind(model=tiny, max_tokens=8) as llm:
        whole = text_of(llm.invoke(PROMPT))
    with kind(model=tiny, max_tokens=8, cache=cache) as llm:
        assert text_of(llm.invoke(PROMPT, stop=["\0"])) == whole
    with kind(model=tiny, max_tokens=8, cache=cache, stop=[whole[3]]) as llm:
        assert text_of(llm.invoke(PROMPT, stop=["\0"])) == whole[: whole.index(whole[3])]


@KINDS
def test_another_model_in_the_same_folder_has_another_key(kind: Any, tmp_path: Path, cache: Counted) -> None:
    folder = save_tiny_chat(tmp_path / "model")
    with kind(model=str(folder), max_tokens=4, cache=cache) as llm:
        llm.invoke(PROMPT)
        llm.invoke(PROMPT)
        assert cache.hits == 1
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    with kind(model=str(folder), max_tokens=4, cache=cache) as llm:
        llm.invoke(PROMPT)
    assert cache.hits == 1


@KINDS
def test_requests_about_documents_are_told_apart(kind: Any, tiny: str, cache: Counted) -> None:
    """The same words in other pages, from another file, in other turns of the history."""
    one = {"context": [Document("a\n\nb", metadata={"source": "x/a.pdf"})], "question": "What?"}
    values = [
        one,
        {**one, "context": [Document("a\n\nb", metadata={"source": "y/a.pdf"})]},
        {**one, "context": [Document("a", metadata={"page": 0}), Document("b", metadata={"page": 1})]},
        {**one, "history": [("q", "a\n\nb")]},
        {**one, "history": [("q\n\na", "b")]},
    ]
    with kind(model=tiny, max_tokens=4, cache=cache) as llm:
        chain = stuff_documents_chain(llm)
        for value in values:
            chain.invoke(value)
        assert cache.hits == 0
        chain.invoke(one)
        assert cache.hits == 1


def test_a_key_needs_no_weights(tiny: str) -> None:
    llm = TideKVLLM(model=tiny)
    assert llm.identity()["weights"]
    assert TideKVLLM(model="some/hub-model").identity()["weights"] != llm.identity()["weights"]
    assert not llm.engine_handle().loaded
