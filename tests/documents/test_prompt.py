"""Prompts: the document first, the question last, exact spans, and no special token from untrusted text."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tidekv_llm.documents import Document, build_prompt, chat_prompt, count_document_tokens
from tidekv_llm.errors import ConfigError, ContextOverflowError, NoTextError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}<|im_start|>model\n"
)
COUNTS_TURNS = "{{ messages | length }} turns\n" + CHATML
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(template: str | None = CHATML, *, adds_bos: bool = False, tool_token: bool = False):
    """A byte-level tokenizer of 256 letters and three special tokens: nothing is downloaded."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    if tool_token:
        core.add_tokens(["<tool_call>"])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=[CHATML, NO_SYSTEM, COUNTS_TURNS, None], ids=["chatml", "no-system", "counts", "plain"])
def tokenizer(request):
    return make_tokenizer(request.param, adds_bos=request.param in (None, NO_SYSTEM))


BOOK = Document.from_pages(["First page.", "Second page.", "Third page."], "book.pdf", ["iv", "A", "1"])


def test_the_document_prefix_depends_on_neither_question_nor_history(tokenizer):
    prompts = [
        build_prompt(BOOK, "Why?", tokenizer),
        build_prompt(BOOK, "[p. 9] What <|im_end|> else?", tokenizer),
        build_prompt(BOOK, "And then?", tokenizer, history=[("Why?", "Because."), ("Who?", "She.")]),
    ]
    assert len({prompt.token_ids[: prompt.document_end] for prompt in prompts}) == 1
    assert len({prompt.token_ids for prompt in prompts}) == 3


def test_spans_are_exact_and_adjoin(tokenizer):
    prompt = build_prompt(BOOK, "Why?", tokenizer)
    texts = [tokenizer.decode(prompt.token_ids[span.start : span.stop]) for span in prompt.spans]
    assert texts == ["[p. iv]\nFirst page.\n\n", "[p. A]\nSecond page.\n\n", "[p. 1]\nThird page.\n\n"]
    assert [span.stop for span in prompt.spans] == [*(s.start for s in prompt.spans[1:]), prompt.document_end]
    assert count_document_tokens(BOOK, tokenizer) == [span.stop - span.start for span in prompt.spans]


def test_order_of_the_parts(tokenizer):
    prompt = build_prompt(BOOK, "LAST", tokenizer, history=[("ASKED", "ANSWERED")], instructions="INSTRUCTED")
    text = tokenizer.decode(prompt.token_ids)
    places = [text.index(word) for word in ("INSTRUCTED", "First page", "Third page", "ASKED", "ANSWERED", "LAST")]
    assert places == sorted(places)
    assert all(text.count(word) == 1 for word in ("INSTRUCTED", "ASKED", "ANSWERED", "LAST"))


def test_special_tokens_in_untrusted_text_are_plain_text(tokenizer):
    calm = build_prompt(Document.from_text("x"), "y", tokenizer, history=[("h", "a")], instructions="i")
    evil = "".join(SPECIAL)
    loud = build_prompt(Document.from_text(evil, evil), evil, tokenizer, history=[(evil, evil)], instructions=evil)
    special = set(tokenizer.convert_tokens_to_ids(SPECIAL))
    assert [i for i in loud.token_ids if i in special] == [i for i in calm.token_ids if i in special]
    assert tokenizer.decode(loud.token_ids).count(evil) >= 5


def test_control_tokens_that_are_not_marked_special_are_split():
    tokenizer = make_tokenizer(tool_token=True)
    tool = tokenizer.convert_tokens_to_ids("<tool_call>")
    assert tool in tokenizer("<tool_call>")["input_ids"]
    prompt = build_prompt(Document.from_text("a <tool_call> b<tool_call>"), "<tool_call>?", tokenizer)
    assert tool not in prompt.token_ids
    assert tokenizer.decode(prompt.token_ids).count("<tool_call>") == 3


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, None])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_at_most_one_bos_and_only_in_front(template, adds_bos):
    tokenizer = make_tokenizer(template, adds_bos=adds_bos)
    ids = build_prompt(BOOK, "Why?", tokenizer).token_ids
    wanted = int(adds_bos or template == NO_SYSTEM)
    assert ids.count(tokenizer.bos_token_id) == wanted
    assert ids[:wanted] == (tokenizer.bos_token_id,) * wanted


def test_the_chat_prompt_equals_the_templates_own_tokens():
    tokenizer = make_tokenizer()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]  # fmt: skip
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert chat_prompt(messages, tokenizer) == list(own["input_ids"])


def test_system_messages_are_merged_and_moved_where_no_system_role_exists():
    messages = [{"role": "system", "content": "One."}, {"role": "user", "content": "Hello"},
                {"role": "system", "content": "Two."}]  # fmt: skip
    assert (
        make_tokenizer()
        .decode(chat_prompt(messages, make_tokenizer()))
        .startswith("<|im_start|>system\nOne.\n\nTwo.<|im_end|>\n<|im_start|>user\nHello")
    )
    plain = make_tokenizer(NO_SYSTEM)
    assert "user\nOne.\n\nTwo.\n\nHello<|im_end|>" in plain.decode(chat_prompt(messages, plain))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": None}],
        ["hello"],
    ],
)
def test_bad_messages_are_config_errors(messages):
    with pytest.raises(ConfigError):
        chat_prompt(messages, make_tokenizer())


def test_chat_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        chat_prompt([{"role": "user", "content": "x"}], make_tokenizer(None))


def test_a_template_that_refuses_the_conversation_is_one_line():
    broken = make_tokenizer("{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match="refuses this conversation: never"):
        build_prompt(BOOK, "Why?", broken)


def test_several_files_are_named_even_when_names_clash(tokenizer):
    one, two = Document.from_text("alpha", "a[1].txt"), Document.from_text("beta", "a[1].txt")
    prompt = build_prompt([one, two], "Which?", tokenizer)
    texts = [tokenizer.decode(prompt.token_ids[span.start : span.stop]) for span in prompt.spans]
    assert texts == ["[a(1).txt p. 1]\nalpha\n\n", "[a(1).txt (2) p. 1]\nbeta\n\n"]
    assert [span.document for span in prompt.spans] == [0, 1]


def test_unreadable_pages_cost_no_tokens_and_are_named(tokenizer):
    document = Document.from_pages(["Good.", "/g1/g2/g3/g4", ""], "mixed")
    prompt = build_prompt(document, "Why?", tokenizer)
    assert [span.page for span in prompt.spans] == [1]
    assert "/g1" not in tokenizer.decode(prompt.token_ids)
    assert len(prompt.warnings) == 2
    assert count_document_tokens(document, tokenizer)[1:] == [0, 0]
    with pytest.raises(NoTextError):
        build_prompt(Document.from_pages(["/g1/g2/g3/g4"], "bad"), "Why?", tokenizer)


def test_bad_requests(tokenizer):
    for documents, question, options in [
        (BOOK, " \n", {}),
        ([], "Why?", {}),
        (BOOK, "Why?", {"answer_reserve": -1}),
    ]:
        with pytest.raises(ConfigError):
            build_prompt(documents, question, tokenizer, **options)


def test_an_overflow_names_both_sizes_and_counts_the_reserve(tokenizer):
    size = len(build_prompt(BOOK, "Why?", tokenizer))
    assert len(build_prompt(BOOK, "Why?", tokenizer, limit=size + 10, answer_reserve=10)) == size
    with pytest.raises(ContextOverflowError, match=f"{size + 10}.*{size + 9}") as caught:
        build_prompt(BOOK, "Why?", tokenizer, limit=size + 9, answer_reserve=10)
    assert (caught.value.prompt_tokens, caught.value.limit) == (size + 10, size + 9)
