"""Reasoning is apart from the answer: whole, streamed, in sessions, in citations, for every spelling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.speaking import CHATML, begin_again, speaking
from tidekv_llm import Document
from tidekv_llm.decode.reasoning import ReasoningFormat
from tidekv_llm.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_token_a_step")

HELLO = [{"role": "user", "content": "Hello"}]
NO_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
QWEN = CHATML.replace("assistant\n", f"assistant\n{NO_THINKING}")
R1 = "{# </think> #}" + CHATML.replace("assistant\n", "assistant\n<think>\n")
MAGISTRAL = "{# [THINK] and [/THINK] #}" + CHATML
COMMAND = "{# <|START_THINKING|> <|END_THINKING|> #}" + CHATML
SEED = "{# <seed:think> </seed:think> #}" + CHATML
HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m['content'] }}<|end|>{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHATML_SPECIAL = ("<|im_start|>", "<|im_end|>")
HARMONY_SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
THOUGHT, ANSWER = "Seven < eight.\n\nSo 7?", "It is 7."

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "think": (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}</s>", {"special": CHATML_SPECIAL}),
    "think, added tokens": (
        f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>",
        {"special": CHATML_SPECIAL, "added": ("<think>", "</think>")},
    ),
    "think, special tokens": (
        f"<think>{THOUGHT}</think>{ANSWER}</s>",
        {"special": (*CHATML_SPECIAL, "<think>", "</think>")},
    ),
    "white space first": (f"\n<think>{THOUGHT}</think>\n{ANSWER}</s>", {"special": CHATML_SPECIAL}),
    "begun by the prompt": (f"{THOUGHT}\n</think>\n\n{ANSWER}</s>", {"template": R1, "special": CHATML_SPECIAL}),
    "square brackets": (
        f"[THINK]{THOUGHT}[/THINK]{ANSWER}</s>",
        {"template": MAGISTRAL, "special": (*CHATML_SPECIAL, "[THINK]", "[/THINK]")},
    ),
    "start and end": (
        f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>{ANSWER}</s>",
        {"template": COMMAND, "special": (*CHATML_SPECIAL, "<|START_THINKING|>", "<|END_THINKING|>")},
    ),
    "a prefix": (f"<seed:think>{THOUGHT}</seed:think>{ANSWER}</s>", {"template": SEED, "special": CHATML_SPECIAL}),
    "channels": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>",
        {"template": HARMONY, "special": HARMONY_SPECIAL},
    ),
    "channels, another end": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|end|>",
        {"template": HARMONY, "special": HARMONY_SPECIAL},
    ),
}


@pytest.mark.parametrize(("said", "model"), MODELS.values(), ids=MODELS)
def test_reasoning_is_no_part_of_the_answer(said: str, model: dict[str, Any]) -> None:
    generation = speaking(said, **model).generate(HELLO, max_new_tokens=300)
    assert generation.text == ANSWER
    assert generation.reasoning == THOUGHT


@pytest.mark.parametrize(("said", "model"), MODELS.values(), ids=MODELS)
def test_it_is_streamed_apart(said: str, model: dict[str, Any]) -> None:
    engine = speaking(said, **model)
    stream = engine.stream(HELLO, max_new_tokens=100)
    parts = list(stream.parts())
    assert stream.generation is not None
    assert "".join(part.text for part in parts) == stream.generation.text
    assert "".join(part.reasoning for part in parts) == stream.generation.reasoning == THOUGHT
    assert sum(bool(part.reasoning) for part in parts) > 5
    begin_again(engine)
    assert "".join(engine.stream(HELLO, max_new_tokens=100)) == stream.generation.text


def test_an_answer_cites_and_remembers_the_answer_only() -> None:
    document = Document.from_pages(["The tower holds 7400 litres.", "The pump was built in 1912."], "tower.txt")
    said = "<think>The pump was built in 1912 [p. 2].</think>The tower holds 7400 litres [p. 1].</s>"
    engine, told, thought = speaking(said, special=CHATML_SPECIAL), list[str](), list[str]()
    answer = engine.ask(document, "How much?", max_new_tokens=200, on_text=told.append, on_reasoning=thought.append)
    assert answer.text == "".join(told) == "The tower holds 7400 litres [p. 1]."
    assert answer.reasoning == "".join(thought) == "The pump was built in 1912 [p. 2]."
    assert {citation.page for citation in answer.citations} == {1}
    begin_again(engine)
    with engine.open(document) as session:
        session.ask("How much?", max_new_tokens=200)
        assert session.history == [("How much?", answer.text)]


def test_an_answer_may_spell_the_tags() -> None:
    said = "Use <think>so</think> to think aloud.</s>"
    generation = speaking(said, special=CHATML_SPECIAL).generate(HELLO, max_new_tokens=100)
    assert (generation.text, generation.reasoning) == (said.removesuffix("</s>"), "")


@pytest.mark.parametrize("said", ["<think>\n\n</think>\n\nYes.</s>", "<think></think>Yes.</s>"])
def test_empty_reasoning_is_none(said: str) -> None:
    generation = speaking(said, special=CHATML_SPECIAL).generate(HELLO, max_new_tokens=100)
    assert (generation.text, generation.reasoning) == ("Yes.", "")


@pytest.mark.parametrize("said", ["<thin</s>", "<</s>", " \n<b>bold</b></s>", "</think></s>"])
def test_what_only_looks_like_a_tag_is_text(said: str) -> None:
    generation = speaking(said, special=CHATML_SPECIAL).generate(HELLO, max_new_tokens=100)
    assert (generation.text, generation.reasoning) == (said.removesuffix("</s>"), "")


def test_a_stop_string_ends_the_answer_and_not_the_reasoning() -> None:
    said = "<think>First. Then. </think>One. Then. Two.</s>"
    generation = speaking(said, special=CHATML_SPECIAL).generate(HELLO, max_new_tokens=100, stop="Then.")
    assert (generation.text, generation.reasoning) == ("One. ", "First. Then.")
    assert generation.finish_reason == "stop"


def test_an_answer_that_never_began_says_why() -> None:
    generation = speaking("<think>" + "so " * 50, special=CHATML_SPECIAL).generate(HELLO, max_new_tokens=40)
    assert (generation.text, generation.finish_reason) == ("", "length")
    assert generation.reasoning.startswith("so so so")
    assert any("max_new_tokens was used up by reasoning" in note for note in generation.metrics.notes)


def test_every_other_channel_is_reasoning() -> None:
    said = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary to=x<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Three.<|return|>"
    )
    generation = speaking(said, HARMONY, special=HARMONY_SPECIAL).generate(HELLO, max_new_tokens=120)
    assert (generation.text, generation.reasoning) == ("Three.", "One.\n\nTwo.")


def test_a_prompt_that_begins_the_final_channel_has_no_reasoning() -> None:
    ids = speaking("x", HARMONY, special=HARMONY_SPECIAL).tokenizer("<|start|>assistant<|channel|>final<|message|>")
    generation = speaking("Three.<|end|>", HARMONY, special=HARMONY_SPECIAL).generate(ids["input_ids"])
    assert (generation.text, generation.reasoning, generation.finish_reason) == ("Three.", "", "stop")


# --- chat_template_kwargs -------------------------------------------------------------------------------


def prompt_of(engine: Any, kwargs: dict[str, Any] | None) -> str:
    return engine.tokenizer.decode(engine.encode(HELLO, kwargs))


def test_thinking_is_switched_by_the_templates_own_name() -> None:
    engine = speaking("Yes.</s>", QWEN, special=CHATML_SPECIAL)
    off, on = "assistant\n<think>\n\n</think>\n\n", "assistant\n"
    assert prompt_of(engine, {"enable_thinking": False}).endswith(off)
    assert prompt_of(engine, {"enable_thinking": True}).endswith(on)
    assert prompt_of(engine, None).endswith(off)  # a short answer's tokens are for the answer
    document = Document.from_text("The tower is high.")
    for kwargs, end in (({"enable_thinking": True}, on), (None, off)):
        answer = engine.ask(document, "How?", max_new_tokens=5, chat_template_kwargs=kwargs)
        assert engine.tokenizer.decode(answer.prompt.token_ids).endswith(end)  # type: ignore[union-attr]
        with engine.open(document, chat_template_kwargs=kwargs) as session:
            answer = session.ask("How?", max_new_tokens=5)
            assert engine.tokenizer.decode(answer.prompt.token_ids).endswith(end)  # type: ignore[union-attr]


def test_other_names_reach_the_template_too() -> None:
    template = "{{ reasoning_effort | default('medium') }} {{ tone }}\n" + CHATML
    engine = speaking("Yes.</s>", template, special=CHATML_SPECIAL)
    assert prompt_of(engine, {"reasoning_effort": "low", "tone": "dry"}).startswith("low dry\n")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("enable_thinking", "must be a dict of names"),
        ({1: 2}, "must be a dict of names"),
        ({"tokenize": True}, "may not set 'tokenize'"),
        ({"add_generation_prompt": False}, "may not set 'add_generation_prompt'"),
    ],
    ids=str,
)
def test_impossible_template_values_are_refused(kwargs: Any, message: str) -> None:
    engine = speaking("Yes.</s>", special=CHATML_SPECIAL)
    for call in (
        lambda: engine.generate(HELLO, chat_template_kwargs=kwargs),
        lambda: engine.stream(HELLO, chat_template_kwargs=kwargs),
        lambda: engine.ask(Document.from_text("x"), "y", chat_template_kwargs=kwargs),
        lambda: engine.open(Document.from_text("x"), chat_template_kwargs=kwargs),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize("prompt", ["Hello", [5, 6]])
def test_template_values_need_messages(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="needs a list of messages"):
        speaking("x").generate(prompt, chat_template_kwargs={"enable_thinking": False})


def test_the_template_names_the_tags() -> None:
    def tags(template: str) -> tuple[tuple[str, str], ...]:
        tokenizer = speaking("x", template).tokenizer
        return ReasoningFormat.of(tokenizer).tags

    assert tags(CHATML) == (("<think>", "</think>"),)
    assert tags(MAGISTRAL)[0] == ("[THINK]", "[/THINK]")
    assert tags(COMMAND)[0] == ("<|START_THINKING|>", "<|END_THINKING|>")
    assert tags("{# </reasoning> #}")[0] == ("<reasoning>", "</reasoning>")
    assert tags("{# <|end_of_thought|> #}")[0] == ("<|begin_of_thought|>", "<|end_of_thought|>")
    assert ReasoningFormat.of(None) == ReasoningFormat()
