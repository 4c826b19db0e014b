"""Sessions on tiny models, and the same prompts without one."""

from __future__ import annotations

from typing import Any

import torch

from tests.decode.tokenizers_for_tests import byte_tokenizer
from tests.tiny_models import tiny_model
from tidekv_llm import Document, PrefillConfig, TideKV
from tidekv_llm.documents import document_ends
from tidekv_llm.engine import Session
from tidekv_llm.prefill.result import Prefilled
from tidekv_llm.request import Request

CONFIG = PrefillConfig(chunk_size=48, kept_tokens=40, window_size=8, sinks=2, kernel_size=5)
WORDS = ("the tide table of the harbour lists every high water", "with its hour and height for each day")


def text(length: int, seed: int = 0) -> str:
    """Words in a random order, at least ``length`` characters."""
    generator = torch.Generator().manual_seed(seed)
    chosen, words = list[str](), " ".join(WORDS).split()
    while sum(map(len, chosen)) + len(chosen) < length:
        chosen.append(words[int(torch.randint(len(words), (), generator=generator))])
    return " ".join(chosen)


def document(length: int = 300, seed: int = 0, name: str = "tides.txt") -> Document:
    half = length // 2
    return Document.from_pages([text(half, seed), text(half, seed + 100)], name, ["1", "2"])


def engine(family: str = "llama", config: PrefillConfig = CONFIG, **changes: Any) -> TideKV:
    model = tiny_model(family, vocab_size=259, **changes)
    return TideKV(model, byte_tokenizer(), prefill=config)


def follow_up(session: Session, question: str, history: list[tuple[str, str]] | None = None) -> Prefilled:
    """Prefill of a question as the session does it."""
    return prefill_of(session, question, history, prefix=session._prefix)


def fresh(session: Session, question: str, history: list[tuple[str, str]] | None = None) -> Prefilled:
    """Prefill of the same prompt from nothing."""
    return prefill_of(session, question, history, prefix=None)


def prefill_of(session: Session, question: str, history: list[tuple[str, str]] | None, prefix: Any) -> Prefilled:
    run, prompt = session._run, session._layout.prompt(question, history or ())
    given = run.input(prompt.token_ids, Request(), boundaries=document_ends(prompt), reserve=4, prefix=prefix)
    return run.prefill(given)


def kept(prefilled: Prefilled) -> list[list[int]]:
    """Kept positions of every layer and KV head."""
    cache, heads = prefilled.cache, 2
    return [cache.positions(layer, head).tolist() for layer in range(len(cache.layers)) for head in range(heads)]


def assert_same(one: Prefilled, other: Prefilled, *, exact: bool = True) -> None:
    """Same kept positions and logits, to the bit or to 1e-5."""
    assert kept(one) == kept(other)
    tolerance = 0 if exact else 1e-5
    torch.testing.assert_close(one.logits, other.logits, rtol=tolerance, atol=tolerance)
    if one.evidence is not None and other.evidence is not None:
        torch.testing.assert_close(one.evidence, other.evidence, rtol=tolerance, atol=tolerance)
