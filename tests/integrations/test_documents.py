"""Pages from a loader's items, ranking, the report of what went in, and prefix reuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidekv_llm.documents.loaded import LoadedItem, corpus_of
from tidekv_llm.errors import ConfigError, ContextOverflowError, NoTextError
from tidekv_llm.options import DEFAULT_DRAFTS
from tidekv_llm.service import (
    DocumentRequest,
    EngineHandle,
    EngineSpec,
    Reply,
    call_options,
    document_call,
    run,
)

OPTIONS: dict[str, Any] = {
    "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None, "stop": [],
}  # fmt: skip


def test_options_of_object_and_call() -> None:
    assert call_options({**OPTIONS, "stop": ["a"]}, ["b", "a"], {"max_tokens": None, "top_k": 5}).generation == {
        "temperature": 0.0, "top_p": 1.0, "top_k": 5, "seed": None, "max_new_tokens": 8, "stop": ("a", "b"),
        "drafts": DEFAULT_DRAFTS,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="the same option"):
        call_options(OPTIONS, None, {"max_tokens": 1, "max_new_tokens": 1})


def _ask(handle: EngineHandle, question: str, pages: int, **options: Any) -> Reply:
    texts = [f"Page {n} tells of {'gulls' if n == 7 else 'nothing'}. " + "x " * 40 for n in range(pages)]
    items = [LoadedItem(text, {"page": n}) for n, text in enumerate(texts)]
    request = DocumentRequest(corpus_of(items), question, **options)
    return run(handle, document_call(request, call_options(OPTIONS, None, {})))


@pytest.fixture
def handle(tiny: str) -> Any:
    handle = EngineHandle(EngineSpec(model=tiny))
    yield handle
    handle.close()


def test_everything_goes_in_when_it_fits(handle: EngineHandle) -> None:
    reply = _ask(handle, "What of the gulls?", 8)
    assert len(reply.extra["pages"]["included"]) == 8
    assert reply.extra["pages"]["left_out"] == []
    json.dumps(reply.as_info())


def test_overflow_is_an_error_that_says_what_would_fit(handle: EngineHandle) -> None:
    with pytest.raises(ContextOverflowError, match=r"need 2,\d+ tokens .* 2,048; the first 1\d of 20 pages would fit"):
        _ask(handle, "What of the gulls?", 20)


def test_overflow_retrieve_fills_the_window_in_reading_order(handle: EngineHandle) -> None:
    reply = _ask(handle, "What of the gulls?", 24, overflow="retrieve")
    report = reply.extra["pages"]
    included = [page["items"][0] for page in report["included"]]
    assert 7 in included
    assert included == sorted(included)
    assert len(included) + len(report["left_out"]) == 24
    assert report["included_tokens"] == sum(page["tokens"] for page in report["included"])
    assert reply.metrics.prompt_tokens + 8 <= 2048
    assert reply.metrics.prompt_tokens + 8 + max(page["tokens"] for page in report["left_out"]) > 2048


def test_callers_own_order_decides(handle: EngineHandle) -> None:
    reply = _ask(handle, "What of the gulls?", 24, overflow="retrieve", order=(20, 3, 99))
    assert [page["items"] for page in reply.extra["pages"]["included"]] == [[3], [20]]


def test_page_that_is_longer_than_the_window_is_an_error(handle: EngineHandle) -> None:
    request = DocumentRequest(corpus_of([LoadedItem("y" * 3000, {})]), "What?", overflow="retrieve")
    with pytest.raises(ContextOverflowError, match="not one page fits"):
        run(handle, document_call(request, call_options(OPTIONS, None, {})))


def test_no_readable_page(handle: EngineHandle) -> None:
    with pytest.raises(NoTextError):
        run(
            handle,
            document_call(DocumentRequest(corpus_of([LoadedItem("", {})]), "What?"), call_options(OPTIONS, None, {})),
        )


@pytest.mark.parametrize(("question", "options"), [("  ", {}), ("What?", {"overflow": "cut"})])
def test_bad_requests(handle: EngineHandle, question: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _ask(handle, question, 2, **options)


def test_second_question_reuses_the_documents(tiny: str) -> None:
    plain = EngineHandle(EngineSpec(model=tiny))
    handle = EngineHandle(EngineSpec(model=tiny, prefix_cache_bytes=1 << 28))
    first, second = _ask(handle, "What of the gulls?", 8), _ask(handle, "And page 3?", 8)
    assert first.metrics.reused_prefix_tokens == 0
    assert second.metrics.reused_prefix_tokens > 500
    assert second.text == _ask(plain, "And page 3?", 8).text
    handle.close()
    plain.close()
