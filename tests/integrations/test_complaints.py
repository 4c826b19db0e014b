"""Twenty things people complain about in other integrations, for every model class that they apply to.

The numbers are those of the threads: LC# langchain-ai/langchain, LI# run-llama/llama_index.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import pickle
import socket
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.frameworks import Framework
from tests.integrations.tiny import WINDOW, save_tiny_chat, tiny_tokenizer
from tests.integrations.worker import HANG, Worker, finish
from tidekv_llm.decode.plain import PlainDecoder
from tidekv_llm.engine import TideKV
from tidekv_llm.engine.run import Run
from tidekv_llm.errors import ClosedError
from tidekv_llm.hf import Decoder
from tidekv_llm.service.requests import as_prompt

PROMPT = "Tell me about the sea."


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_01_prompt_is_not_echoed(framework: Framework, tiny: str) -> None:
    """LC#25916."""
    with framework.make(tiny) as llm:
        assert PROMPT not in framework.text(llm, PROMPT)
        assert "".join(framework.deltas(llm, PROMPT)) == framework.text(llm, PROMPT)


def test_02_stop_never_leaks_even_across_deltas(framework: Framework, tiny: str) -> None:
    """LC#22601. Every token is one character here, so a longer stop string always straddles deltas."""
    with framework.make(tiny, max_tokens=16) as llm:
        whole = framework.text(llm, PROMPT)
        stop = whole[4:7]
        expected = whole[: whole.find(stop)]
        assert framework.text(llm, PROMPT, stop=[stop]) == expected
        assert "".join(framework.deltas(llm, PROMPT, stop=[stop])) == expected


def test_03_constructor_stop_and_call_stop_both_hold(framework: Framework, tiny: str) -> None:
    """LC#26810."""
    with framework.make(tiny, max_tokens=16) as llm:
        whole = framework.text(llm, PROMPT)
    early, late = whole[2:4], whole[6:9]
    with framework.make(tiny, max_tokens=16, stop=late) as llm:
        assert framework.text(llm, PROMPT) == whole[: whole.find(late)]
        assert framework.text(llm, PROMPT, stop=[early]) == whole[: whole.find(early)]
        assert framework.text(llm, PROMPT, stop=["\0"]) == whole[: whole.find(late)]


def test_04_chat_template_applies_and_every_eos_ends(framework: Framework, tiny: str, tmp_path: Path) -> None:
    """LC#19770: stop on every id in generation_config.eos_token_id, not only on the tokenizer's."""
    with framework.make(tiny) as llm:
        first = llm.engine_handle().engine().encode([{"role": "user", "content": PROMPT}])
        assert framework.info(llm, PROMPT)["token_usage"]["prompt_tokens"] == len(first)
        third = tiny_tokenizer()(framework.text(llm, PROMPT)[2], add_special_tokens=False)["input_ids"][0]
        whole = framework.text(llm, PROMPT)
    folder = save_tiny_chat(tmp_path / "eos", eos_token_id=[2, third])
    with framework.make(str(folder)) as llm:
        assert framework.text(llm, PROMPT) == whole[: whole.find(whole[2])]
        assert framework.info(llm, PROMPT)["finish_reason"] == "stop"


def test_04_end_of_sequence_at_once_is_an_empty_answer(framework: Framework, tiny: str, tmp_path: Path) -> None:
    with framework.make(tiny) as llm:
        first = tiny_tokenizer()(framework.text(llm, PROMPT)[0], add_special_tokens=False)["input_ids"][0]
    with framework.make(str(save_tiny_chat(tmp_path / "eos", eos_token_id=[2, first]))) as llm:
        assert framework.text(llm, PROMPT) == ""
        assert "".join(framework.deltas(llm, PROMPT)) == ""
        assert framework.stream_info(llm, PROMPT)["token_usage"]["completion_tokens"] == 0


def test_05_exactly_one_beginning_of_sequence(framework: Framework, tiny: str) -> None:
    """abetlen/llama-cpp-python#1439."""
    with framework.make(tiny) as llm:
        engine = llm.engine_handle().engine()
        for prompt, template in (("<s>Hi", False), ("Hi", False), ("Hi", True)):
            ids = engine.encode(as_prompt(engine, prompt, template))
            assert ids.count(1) == 1
            assert ids[0] == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_06_max_tokens_holds_under_both_names(framework: Framework, tiny: str, name: str) -> None:
    """LC#25219, LC#32234."""
    with framework.make(tiny, max_tokens=9) as llm:
        assert len(framework.text(llm, PROMPT)) == 9
        assert len(framework.text(llm, PROMPT, **{name: 4})) == 4
        assert len("".join(framework.deltas(llm, PROMPT, **{name: 4}))) == 4
    with framework.model(model=tiny, **{name: 5}) as llm:
        assert framework.info(llm, PROMPT)["token_usage"]["completion_tokens"] == 5
        assert framework.info(llm, PROMPT)["finish_reason"] == "length"


def test_07_cached_answer_of_other_options_is_not_used(tiny: str) -> None:
    """LC#40403. LlamaIndex has no answer cache."""
    from langchain_core.caches import InMemoryCache

    from langchain_tidekv import ChatTideKV, TideKVLLM

    for kind in (TideKVLLM, ChatTideKV):
        with kind(model=tiny, max_tokens=9, cache=InMemoryCache()) as llm:
            texts = [llm.invoke(PROMPT), llm.invoke(PROMPT, max_tokens=3), llm.invoke(PROMPT, max_new_tokens=5)]
            assert [len(getattr(text, "text", text)) for text in texts] == [9, 3, 5]
            assert llm.invoke(PROMPT, max_tokens=3) == texts[1] or kind is ChatTideKV


def test_07_cached_answer_is_used_for_the_same_call(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.caches import InMemoryCache

    from langchain_tidekv import TideKVLLM

    with TideKVLLM(model=tiny, max_tokens=4, cache=InMemoryCache()) as llm:
        answer = llm.invoke(PROMPT, temperature=0.0)
        monkeypatch.setattr("langchain_tidekv.llm.run", lambda *_: pytest.fail("the cache was not used"))
        assert llm.invoke(PROMPT, temperature=0.0) == answer


def test_08_tokens_are_counted_offline_with_the_models_tokenizer(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LC#4815: neither GPT-2's tokenizer nor the network, and not the weights either."""

    def no_network(*arguments: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    llm = framework.make(tiny)
    assert framework.count(llm, "seven!!") == 7
    assert not llm.engine_handle().loaded


def test_09_error_in_the_worker_reaches_the_stream(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface/transformers#22576: the consumer waited for ever."""
    from tidekv_llm.engine import TideKV

    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("boom")

    with framework.make(tiny) as llm:
        monkeypatch.setattr(TideKV, "stream", fails)
        with pytest.raises(RuntimeError, match="boom"):
            list(framework.deltas(llm, PROMPT))

        async def consume() -> None:
            async for _ in framework.adeltas(llm, PROMPT):
                pass

        with pytest.raises(RuntimeError, match="boom"):
            asyncio.run(asyncio.wait_for(consume(), HANG))
        monkeypatch.undo()
        assert framework.text(llm, PROMPT)


LONG = "All work and no play makes Jack a dull boy. " * 4  # 176 tokens of one character each


def _stepwise(framework: Framework, tiny: str, **options: Any) -> Any:
    """A model that reads a prompt in as many chunk steps as it has tokens, and may be stopped after each."""
    return framework.make(tiny, chunk_size=1, kept_tokens=64, max_tokens=4, **options)


def test_10_event_loop_ticks_during_load_and_prefill(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LI#11842: the worker goes on only when the loop has turned, which a blocked loop never does."""
    turned, held = threading.Event(), []

    def until_the_loop_turns(real: Any) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            if len(held) < 5:
                turned.clear()
                held.append(turned.wait(HANG))
            return real(*given, **named)

        return wrapped

    async def heartbeat() -> None:
        while True:
            await asyncio.sleep(0.001)
            turned.set()

    async def run() -> None:
        pulse = asyncio.create_task(heartbeat())
        assert await framework.atext(llm, PROMPT)
        held.clear()
        async for _ in framework.adeltas(llm, PROMPT):
            pass
        pulse.cancel()

    monkeypatch.setattr(TideKV, "from_pretrained", until_the_loop_turns(TideKV.from_pretrained))
    monkeypatch.setattr(Decoder, "run_layer", until_the_loop_turns(Decoder.run_layer))
    monkeypatch.setattr(PlainDecoder, "step", until_the_loop_turns(PlainDecoder.step))
    with framework.make(tiny) as llm:
        asyncio.run(run())
    assert held == [True] * 5


def test_11_cancelled_task_stops_the_prefill(framework: Framework, tiny: str, worker: Worker) -> None:
    """LC#23282, LI#12242."""

    async def cancel_while_held() -> None:
        task = asyncio.create_task(framework.atext(llm, LONG))
        await asyncio.to_thread(worker.wait_until_held)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with _stepwise(framework, tiny) as llm:
        llm.engine_handle().engine()  # the check at load runs layers too
        with worker.held(at=10):
            asyncio.run(cancel_while_held())
        finish(llm)
        assert worker.runs <= 11 < len(LONG)


def test_11_abandoned_streams_stop(framework: Framework, tiny: str, worker: Worker) -> None:
    with framework.make(tiny, max_tokens=500) as llm:
        layers = llm.engine_handle().engine().model.config.num_hidden_layers
        whole = worker.runs_of(lambda: framework.text(llm, PROMPT))
        with worker.held(at=whole // 2):
            stream = framework.deltas(llm, PROMPT)
            next(stream)
            stream.close()
        finish(llm)
        assert worker.runs < whole // 2 + layers

        async def leave() -> None:
            stream = framework.adeltas(llm, PROMPT)
            await anext(stream)
            await stream.aclose()

        with worker.held(at=whole // 2):
            asyncio.run(leave())
        finish(llm)
        assert worker.runs < whole // 2 + layers


def test_11_request_waiting_for_its_turn_can_be_cancelled(framework: Framework, tiny: str, worker: Worker) -> None:
    async def run() -> None:
        with worker.held():
            first = asyncio.create_task(framework.atext(llm, LONG))
            await asyncio.to_thread(worker.wait_until_held)
            second = asyncio.create_task(framework.atext(llm, LONG))
            await asyncio.sleep(0)  # it joins the queue
            second.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await second
        assert await first

    with _stepwise(framework, tiny) as llm:
        llm.engine_handle().engine()
        whole = worker.runs_of(lambda: framework.text(llm, LONG))
        asyncio.run(run())
        finish(llm)
        assert worker.runs == whole


def test_12_concurrent_requests_give_what_they_give_alone(framework: Framework, tiny: str) -> None:
    """abetlen/llama-cpp-python#471."""
    prompts = [f"{number} {PROMPT}" for number in range(6)]
    with framework.make(tiny) as llm:
        alone = [framework.text(llm, prompt) for prompt in prompts]
        found: dict[int, str] = {}

        def ask(index: int) -> None:
            found[index] = "".join(framework.deltas(llm, prompts[index]))

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[index] for index in range(len(prompts))] == alone

        async def together() -> list[str]:
            return await asyncio.gather(*(framework.atext(llm, prompt) for prompt in prompts))

        assert asyncio.run(together()) == alone


def test_13_documents_go_in_as_text_not_as_repr(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LI#12613."""
    from langchain_core.documents import Document
    from llama_index.core.schema import TextNode

    from langchain_tidekv import TideKVLLM, stuff_documents_chain
    from llama_index.llms.tidekv import TideKVLLM as LlamaIndexLLM
    from llama_index.llms.tidekv import WholeDocumentQueryEngine

    seen: list[str] = []
    real = Run.prefill

    def prefill(run: Run, task: Any) -> Any:
        seen.append(run.hold.get().tokenizer.decode(task.ids[0]))  # type: ignore[union-attr]
        return real(run, task)

    monkeypatch.setattr(Run, "prefill", prefill)
    with TideKVLLM(model=tiny) as llm, LlamaIndexLLM(model=tiny) as other:
        page = "The tower is high."
        stuff_documents_chain(llm).invoke({"context": [Document(page)], "question": "How high?"})
        WholeDocumentQueryEngine(other, [TextNode(text=page)]).query("How high?")
    assert len(seen) == 2
    for prompt in seen:
        assert f"[p. 1]\n{page}\n" in prompt
        assert "Document(" not in prompt
        assert "page_content" not in prompt


def test_14_context_window_is_the_models(framework: Framework, tiny: str) -> None:
    """LI#14722, LI#17251."""
    llm = framework.make(tiny)
    if framework.name == "llama-index":
        assert llm.metadata.context_window == WINDOW
        assert llm.metadata.num_output == 12
        assert framework.make(tiny, context_window=500).metadata.context_window == 500
    assert llm.engine_handle().context_window() == WINDOW
    if framework.name == "langchain-chat":
        assert llm.profile["max_input_tokens"] == WINDOW
    assert not llm.engine_handle().loaded


def test_15_llama_index_packs_by_the_models_own_tokens(tiny: str) -> None:
    """LI#14066, LI#8046: with another tokenizer's counts, text that was said to fit overflowed."""
    from llama_index.core import Settings, SummaryIndex
    from llama_index.core.schema import TextNode

    from llama_index.llms.tidekv import TideKVLLM, configure_settings

    before = (Settings._llm, Settings._prompt_helper, Settings._chat_prompt_helper)
    words = [TextNode(text="the keeper of the lighthouse " * 20) for _ in range(5)]  # 2,900 characters
    with TideKVLLM(model=tiny, max_tokens=16) as llm:
        configure_settings(llm)
        try:
            assert len(Settings.tokenizer("abc")) == 3
            for mode in ("compact", "tree_summarize"):
                answer = SummaryIndex(nodes=words).as_query_engine(response_mode=mode).query("Who?")
                assert str(answer)
        finally:
            Settings._llm, Settings._prompt_helper, Settings._chat_prompt_helper = before
            Settings.tokenizer = None


def test_16_too_long_is_an_error_with_both_counts_and_nothing_is_cut(
    framework: Framework, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ollama#8099, ollama#3839."""
    text = "x" * 3000
    with framework.make(tiny) as llm:
        monkeypatch.setattr(Run, "prefill", lambda *_: pytest.fail("something was computed"))
        for call in (lambda: framework.text(llm, text), lambda: list(framework.deltas(llm, text))):
            with pytest.raises(framework.overflow, match=r"3,0\d\d .*2,048") as caught:
                call()
            assert caught.value.prompt_tokens > 3000
            assert caught.value.limit == WINDOW


def test_17_token_counts_are_there_and_right(framework: Framework, tiny: str) -> None:
    """LI#16311, LI#19740."""
    with framework.make(tiny) as llm:
        for info in (framework.info(llm, PROMPT), framework.stream_info(llm, PROMPT)):
            usage = info["token_usage"]
            assert usage["completion_tokens"] == 12
            assert usage["prompt_tokens"] > len(PROMPT)
            assert usage["total_tokens"] == usage["prompt_tokens"] + 12
            figures = info["tidekv"]
            assert figures["ttft_seconds"] > 0
            assert figures["cache_bytes"] > 0
            assert figures["construction_peak_bytes"] > 0
            assert figures["components"]["weights"] > 0
            assert figures["reused_prefix_tokens"] == 0
            json.dumps(info)


def test_18_close_frees_the_weights(framework: Framework, tiny: str) -> None:
    """LI#12492."""
    first, second = framework.make(tiny), framework.make(tiny, kept_tokens=64)
    weights = weakref.ref(first.engine_handle().engine().model)
    assert second.engine_handle().engine().model is weights()
    assert framework.text(first, PROMPT)
    first.close()
    gc.collect()
    assert weights() is not None  # the other one uses them
    assert framework.text(second, PROMPT)
    second.close()
    gc.collect()
    assert weights() is None
    with pytest.raises(framework.error, match="closed") as caught:
        framework.text(first, PROMPT)
    assert isinstance(caught.value, ClosedError) or framework.name.startswith("langchain")


def test_19_pickles_and_copies_carry_no_weights(framework: Framework, tiny: str) -> None:
    """LI#9480."""
    with framework.make(tiny, kept_tokens=256, stop=["zz"]) as llm:
        answer = framework.text(llm, PROMPT)
        model = llm.engine_handle().engine().model
        data = pickle.dumps(llm)
        assert len(data) < 20_000
        for other in (pickle.loads(data), copy.deepcopy(llm), copy.copy(llm), llm.model_copy()):
            assert other.stop == ["zz"]
            assert other.prefill.kept_tokens == 256
            assert framework.text(other, PROMPT) == answer
            assert other.engine_handle().engine().model is model


def test_19_given_engine_is_shared_by_copies_and_not_pickled(framework: Framework, tiny: str) -> None:
    from tidekv_llm import TideKV

    with TideKV.from_pretrained(tiny) as engine:
        llm = framework.model(engine=engine, max_tokens=5)
        assert llm.model == tiny
        other = copy.deepcopy(llm)
        assert other.engine is engine
        assert framework.text(other, PROMPT) == framework.text(llm, PROMPT)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(llm)
        llm.close()
        assert framework.text(other, PROMPT)
        assert engine.generate("still open", max_new_tokens=2).text


def test_20_several_system_messages_become_one(tiny: str) -> None:
    """LI#13728."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from llama_index.core.llms import ChatMessage

    from langchain_tidekv.prompts import engine_messages
    from llama_index.llms.tidekv import TideKVLLM
    from llama_index.llms.tidekv.base import engine_messages as of_messages

    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes?"), ("system", "Be brief."), ("user", "Ho")]
    kinds = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    of_langchain = engine_messages([kinds[role](text) for role, text in turns])
    of_llama_index = of_messages([ChatMessage(role=role, content=text) for role, text in turns])
    assert of_langchain == of_llama_index
    with TideKVLLM(model=tiny) as llm:
        engine = llm.engine_handle().engine()
        prompt = engine.tokenizer.decode(engine.encode(of_langchain))
        assert prompt.count("<|im_start|>system") == 1
        assert "Be kind.\n\nBe brief." in prompt
        assert llm.chat([ChatMessage(role=role, content=text) for role, text in turns]).message.content


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_token": 5}, "max_token"),
        ({"max_tokens": -1}, "greater than 0"),
        ({"max_tokens": 5, "max_new_tokens": 5}, "the same option"),
        ({"kept_tokens": 3}, "kept_tokens=3"),
        ({"prefill": {"chunk": 1}}, "unknown prefill option 'chunk'"),
        ({"prefill": {}, "kept_tokens": 64}, "not both ways"),
        ({"temperature": -0.5}, "greater than or equal to 0"),
        ({"stop": [""]}, "stop string is empty"),
        ({"engine": object()}, "must be a tidekv_llm.TideKV"),
        ({"timeout": 0}, "greater than 0"),
    ],
)
def test_bad_arguments_are_refused(framework: Framework, tiny: str, options: dict[str, Any], says: str) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match=says):
        framework.model(model=tiny, **options)


def test_bad_calls_are_refused(framework: Framework, tiny: str) -> None:
    with framework.make(tiny) as llm:
        for prompt, options, says in (
            ("", {}, "empty"),
            ("   ", {}, "empty"),
            (PROMPT, {"max_length": 5}, "unknown option 'max_length'"),
            (PROMPT, {"max_tokens": -3}, "max_new_tokens=-3"),
            (PROMPT, {"max_tokens": 2.5}, "whole number"),
            (PROMPT, {"top_p": "high"}, "number"),
        ):
            with pytest.raises(framework.error, match=says):
                framework.text(llm, prompt, **options)


def test_unknown_model_is_a_typed_error(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from tidekv_llm.errors import ModelNotFoundError

    llm = framework.make("no/such-model-anywhere")
    with pytest.raises(framework.error, match="no model 'no/such-model-anywhere'") as caught:
        framework.text(llm, PROMPT)
    assert isinstance(caught.value, ModelNotFoundError)


def test_timeout_stops_the_request(framework: Framework, tiny: str, worker: Worker) -> None:
    with _stepwise(framework, tiny).model_copy(update={"timeout": 0.2}) as llm:
        llm.engine_handle().engine()
        with worker.held(), pytest.raises(framework.error, match=r"timeout=0\.2"):
            framework.text(llm, LONG)
        finish(llm)
        assert worker.runs <= 2
        with worker.held(), pytest.raises(TimeoutError):
            asyncio.run(framework.atext(llm, LONG))
        finish(llm)
        assert worker.runs <= 2


def test_base_model_continues_text(framework: Framework, tiny_base: str) -> None:
    with framework.make(tiny_base) as llm:
        if framework.name == "langchain-chat":
            with pytest.raises(framework.error, match="no chat template"):
                framework.text(llm, PROMPT)
        else:
            assert framework.info(llm, PROMPT)["token_usage"]["prompt_tokens"] == len(PROMPT) + 1


def test_raw_completion_on_request(framework: Framework, tiny: str) -> None:
    if framework.name == "langchain-chat":
        pytest.skip("a chat model has no raw completion")
    with framework.make(tiny, chat_template=False) as llm:
        assert framework.info(llm, PROMPT)["token_usage"]["prompt_tokens"] == len(PROMPT) + 1


def test_requests_are_served_in_order(tiny: str) -> None:
    """One at a time, first come, first served."""
    from llama_index.llms.tidekv import TideKVLLM

    order: list[int] = []
    with TideKVLLM(model=tiny, max_tokens=2) as llm:
        llm.engine_handle().engine()

        async def ask(index: int) -> None:
            await llm.acomplete(PROMPT)
            order.append(index)

        async def all_of_them() -> None:
            await asyncio.gather(*(ask(index) for index in range(8)))

        asyncio.run(all_of_them())
    assert order == list(range(8))
