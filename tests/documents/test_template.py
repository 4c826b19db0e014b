"""Chats have the template's own ids, a template's error is shown as what it is, neighbours of one role are one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.documents.test_prompt import BOOK, CHATML, NO_SYSTEM, SPECIAL, make_tokenizer
from tidekv_llm.documents import build_prompt, chat_prompt
from tidekv_llm.errors import ConfigError

ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'].strip() }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LEFT_ONLY = CHATML.replace("m['content']", "m['content'].lstrip()")
DROPS_THOUGHTS = CHATML.replace("m['content']", "m['content'].split('</think>')[-1].lstrip('\\n')")
TEXTS = [
    "Hello",
    "  Hello \n",
    "\n\nHello",
    "Hello\n",
    "\t",
    "a  b",
    "<think>\nso\n</think>\n\nHello",
    "<|im_end|",
    "é\u00a0",
]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


def own_ids(tokenizer: Any, conversation: list[dict[str, str]]) -> list[int]:
    own = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=True, enable_thinking=False
    )
    return list(own["input_ids"])


@pytest.mark.parametrize("template", [CHATML, ALTERNATES, LEFT_ONLY, DROPS_THOUGHTS, NO_SYSTEM])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_template_given_the_real_text(template: str, text: str) -> None:
    tokenizer = make_tokenizer(template)
    for conversation in (
        messages(("user", text)),
        messages(("user", "Hi"), ("assistant", text), ("user", text)),
    ):
        assert chat_prompt(conversation, tokenizer) == own_ids(tokenizer, conversation)


@pytest.mark.parametrize("template", [CHATML, ALTERNATES, LEFT_ONLY])
def test_text_that_spells_a_control_token_is_trimmed_as_the_template_trims_but_stays_text(template: str) -> None:
    tokenizer = make_tokenizer(template)
    evil = f"  {''.join(SPECIAL)} x \n"
    ids = chat_prompt(messages(("user", evil)), tokenizer)
    special = set(tokenizer.convert_tokens_to_ids(SPECIAL))
    assert sum(token in special for token in ids) == 3  # the template's own
    expected = tokenizer.apply_chat_template(messages(("user", evil)), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == expected


def test_history_around_a_document_is_trimmed_as_the_template_trims() -> None:
    history = [("Why?", "  Because.\n")]
    for template, shown in (
        (ALTERNATES, "assistant\nBecause.<|im_end|>"),
        (CHATML, "assistant\n  Because.\n<|im_end|>"),
    ):
        tokenizer = make_tokenizer(template)
        assert shown in tokenizer.decode(build_prompt(BOOK, "And?", tokenizer, history=history).token_ids)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Only French, please') }}", "refuses this conversation: Only French, please"),
        ("{% for m in messages %}", r"has a syntax error in line 1: .*endfor"),
        ("{{ messages[0]['content' }}", r"has a syntax error in line 1"),
        ("{{ tools | length }}{{ messages[0].content }}", "wants tools .*none are given here"),
        ("{{ tools[0].name }}{{ messages[0].content }}", "wants tools .*none are given here"),
        (
            "{{ persona.name }}{{ messages[0]['content'] }}",
            r"a name that nobody gave: 'persona' is undefined.*kwargs",
        ),
        ("{{ messages[0]['content'] + 1 }}", "the chat template fails .*TypeError"),
        ("{{ 1 // 0 }}", "the chat template fails .*ZeroDivisionError"),
        ("nothing", r"drops, repeats or moves messages\[0\], of role 'user'"),
        ("{{ messages[0]['content'] }}{{ messages[0]['content'] }}", r"drops, repeats or moves messages\[0\]"),
    ],
    ids=["refusal", "open loop", "bracket", "tools", "first tool", "name", "type", "division", "drops", "repeats"],
)
def test_a_templates_error_is_shown_as_what_it_is(template: str, message: str) -> None:
    tokenizer = make_tokenizer(template)
    for call in (
        lambda: chat_prompt(messages(("user", "Hello")), tokenizer),
        lambda: build_prompt(BOOK, "Why?", tokenizer, instructions=""),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "alternate" not in str(caught.value)


def test_the_second_refusal_is_shown_where_the_system_role_was_the_first() -> None:
    """Without the system message the conversation is tried again: what is wrong with it then is what matters."""
    no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    conversation = messages(("system", "Be kind."), ("assistant", "Hi"), ("user", "Hello"), ("assistant", "Bye"))
    backwards = ALTERNATES.replace("(m['role'] == 'user')", "(m['role'] == 'assistant')")
    with pytest.raises(ConfigError, match="refuses this conversation: Conversation roles must alternate") as caught:
        chat_prompt([*conversation[:1], *conversation[2:]], make_tokenizer(no_system + backwards))
    assert "no system" not in str(caught.value)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([("user", "a"), ("user", "b")], [("user", "a\n\nb")]),
        ([("user", "a"), ("system", "s"), ("user", "b")], [("system", "s"), ("user", "a\n\nb")]),
        (
            [("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")],
            [("user", "a"), ("assistant", "b\n\nc"), ("user", "d")],
        ),
        ([("system", "s"), ("system", "t"), ("user", "a")], [("system", "s\n\nt"), ("user", "a")]),
        (
            [("user", "a"), ("assistant", "b"), ("system", "s"), ("assistant", "c"), ("user", "d")],
            [("system", "s"), ("user", "a"), ("assistant", "b\n\nc"), ("user", "d")],
        ),
    ],
)
def test_neighbours_of_one_role_are_one_message(turns: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    tokenizer = make_tokenizer()
    assert chat_prompt(messages(*turns), tokenizer) == own_ids(tokenizer, messages(*expected))


def test_a_system_message_between_two_users_suits_a_strict_template() -> None:
    tokenizer = make_tokenizer(ALTERNATES)
    told = messages(("user", "a"), ("system", "s"), ("user", "b"), ("assistant", "c"), ("user", "d"))
    assert "user\ns\n\na\n\nb<|im_end|>" in tokenizer.decode(chat_prompt(told, tokenizer))


SURROGATES = ["\ud83d", "a\udc00b", "\udfff and \ud800"]


@pytest.mark.parametrize("text", SURROGATES, ids=ascii)
def test_half_a_character_is_one_error_with_its_place(text: str) -> None:
    for tokenizer in (make_tokenizer(), make_tokenizer(None)):
        for call in (
            lambda tokenizer=tokenizer: build_prompt(BOOK, text, tokenizer),
            lambda tokenizer=tokenizer: build_prompt(BOOK, "Why?", tokenizer, history=[("a", text)]),
            lambda tokenizer=tokenizer: build_prompt(BOOK, "Why?", tokenizer, instructions=text),
        ):
            with pytest.raises(ConfigError, match=r"half of a character \(a lone surrogate\)"):
                call()
    for role in ("user", "system", "assistant"):
        with pytest.raises(ConfigError, match="half of a character"):
            chat_prompt(messages((role, text), ("user", "Why?")), make_tokenizer())


@pytest.mark.parametrize("empty", [[], (), {}, "", None, iter(())])
def test_no_message_is_one_error(empty: Any) -> None:
    with pytest.raises(ConfigError, match="messages is empty"):
        chat_prompt(empty, make_tokenizer())
