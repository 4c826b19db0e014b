"""The end of a turn stops the answer: control tokens of the template, and what the next turn would begin with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.speaking import CHATML, speaking
from tidekv_llm import Document
from tidekv_llm.documents.template import TurnEnd, turn_end

pytestmark = pytest.mark.usefixtures("one_token_a_step")

HELLO = [{"role": "user", "content": "Hello"}]
TOWER = Document.from_pages(["The tower holds 7400 litres.", "The pump was built in 1912."], "tower.txt")
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
GLM = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}<|assistant|>\n"
ALPACA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n\n"
    "{% else %}### Response:\n{{ m['content'] }}\n\n{% endif %}{% endfor %}### Response:\n"
)


@pytest.mark.parametrize(
    ("template", "special", "end"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
        (GLM, ("<|user|>", "<|assistant|>"), "<|user|>"),
    ],
    ids=["chatml", "gemma", "glm"],
)
def test_a_control_token_that_ends_the_templates_turns_is_a_stop(
    template: str, special: tuple[str, ...], end: str
) -> None:
    """The end of sequence that the tokenizer names is another one."""
    said = f"It is 7.{end}\nInvented, and more [p. 2]."
    for prompt in (HELLO, "raw"):
        generation = speaking(said, template, special=special).generate(prompt, max_new_tokens=60)
        assert (generation.text, generation.finish_reason) == ("It is 7.", "stop")
    answer = speaking(said, template, special=special).ask(TOWER, "How much?", max_new_tokens=60)
    assert (answer.text, answer.finish_reason) == ("It is 7.", "stop")
    assert 2 not in {citation.page for citation in answer.citations}


@pytest.mark.parametrize("marker", ["\n\nQuestion: And the pump?\nAnswer:", "\nQuestion: And?", "\n\nQuestion:"])
def test_a_model_without_a_template_does_not_go_on_with_the_next_question(marker: str) -> None:
    answer = speaking(f"It holds 7400 litres.{marker} Built in 1912 [p. 2].", None).ask(TOWER, "How much?")
    assert (answer.text, answer.finish_reason) == ("It holds 7400 litres.", "stop")
    assert 2 not in {citation.page for citation in answer.citations}


@pytest.mark.parametrize("said", ["The Question: is open.</s>", "Questions\n\nQuestion marks?</s>"])
def test_a_word_that_is_not_the_marker_does_not_stop(said: str) -> None:
    assert speaking(said, None).ask(TOWER, "How much?", max_new_tokens=60).text == said.removesuffix("</s>")


def test_sessions_stop_there_too_and_remember_no_invented_question() -> None:
    with speaking("It holds 7400 litres.\n\nQuestion: And? ", None).open(TOWER) as session:
        session.ask("How much?", max_new_tokens=60)
        assert session.history == [("How much?", "It holds 7400 litres.")]


def test_a_template_without_control_tokens_stops_at_what_the_next_turn_begins_with() -> None:
    said = "It is 7.\n\n### Instruction:\nInvented [p. 2]."
    assert speaking(said, ALPACA).generate(HELLO, max_new_tokens=60).text == "It is 7."
    answer = speaking(said, ALPACA).ask(TOWER, "How much?", max_new_tokens=60, stop=["never"])
    assert (answer.text, answer.finish_reason) == ("It is 7.", "stop")
    # Text that is continued as it stands has no turns.
    assert speaking(said, ALPACA).generate("raw", max_new_tokens=40).text == said[:40]


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (CHATML, (), "<|im_end|>\n<|im_start|>user"),
        (LLAMA2, (), "</s>"),
        (ALPACA, (), "\n\n### Instruction:"),
        ("{{ messages[0]['content'] }}", (), ""),
        ("{{ raise_exception('no') }}", (), ""),
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", (), ""),
        (None, (), ""),
    ],
    ids=["chatml", "chatml as text", "llama 2", "alpaca", "one message", "refuses", "nothing between", "none"],
)
def test_where_a_turn_ends(template: Any, special: tuple[str, ...], expected: str) -> None:
    tokenizer: Any = speaking("x", template, special=special).tokenizer
    end = turn_end(tokenizer)
    found = end.text if end.token_id is None else tokenizer.decode([end.token_id])
    assert found == expected
    assert isinstance(end, TurnEnd)


def test_ignoring_the_end_ignores_every_end() -> None:
    engine = speaking("It is 7.<|im_end|>", special=("<|im_start|>", "<|im_end|>"))
    assert len(engine.generate(HELLO, max_new_tokens=30, ignore_eos=True).token_ids) == 30
