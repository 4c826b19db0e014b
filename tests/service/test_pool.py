"""Engines by name: loaded once, freed with their last user, one model in memory where there is a limit."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from tidekv_llm.engine import TideKV
from tidekv_llm.errors import BusyError, ClosedError, ModelNotFoundError
from tidekv_llm.service import Delta, EngineHandle, EnginePool, EngineSpec, RequestTimeoutError, iterate, run


class FakeEngine:
    """What the pool needs of an engine; knows whether it was closed."""

    tokenizer, shape, context_window, devices = "words", "dimensions", 100, ()

    def __init__(self, name: str, base: FakeEngine | None = None) -> None:
        self.name, self.base, self.closed = name, base, False

    def with_prefill(self, config: Any = None) -> FakeEngine:
        assert not self.closed
        return FakeEngine(self.name, self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names in the order of loading; the engines are fakes."""
    names: list[str] = []

    def load(name: str, **options: Any) -> FakeEngine:
        names.append(name)
        if name == "missing":
            raise ModelNotFoundError("no model 'missing'")
        return FakeEngine(name)

    monkeypatch.setattr(TideKV, "from_pretrained", load)
    return names


def test_one_model_makes_way_for_another_and_comes_back(loads: list[str]) -> None:
    order: list[str] = []
    pool = EnginePool(most_loaded=1, before_unload=lambda: order.append(f"stores of {loads[-1]} go"))
    one, two = EngineHandle(EngineSpec("one"), pool), EngineHandle(EngineSpec("two"), pool)
    first: Any = one.engine()
    second: Any = two.engine()
    assert first.closed and first.base.closed and not second.closed
    assert order == ["stores of one go"]
    assert not one.loaded and one.facts is not None and one.facts.tokenizer == "words"
    again: Any = one.engine()
    assert not again.closed and second.closed
    assert loads == ["one", "two", "one"]
    assert one.engine() is again
    one.close()
    assert again.base.closed


def test_models_of_a_pool_without_a_limit_stay(loads: list[str]) -> None:
    pool = EnginePool()
    handles = [EngineHandle(EngineSpec(name), pool) for name in ("one", "two", "one")]
    assert not any(handle.engine().closed for handle in handles)  # type: ignore[attr-defined]
    assert loads == ["one", "two"]


def test_a_limited_pool_serves_one_request_at_a_time_and_refuses_beyond_its_line(loads: list[str]) -> None:
    pool = EnginePool(most_loaded=1, most_waiting=1)
    one, two = EngineHandle(EngineSpec("one"), pool), EngineHandle(EngineSpec("two"), pool)
    one.join(), two.join()
    with pytest.raises(BusyError, match="2 requests are waiting"):
        two.join()


def test_all_who_wait_for_a_load_hear_of_its_failure_and_the_next_tries_again(
    loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, entered, go = TideKV.from_pretrained, threading.Event(), threading.Event()

    def load(name: str, **options: Any) -> Any:
        entered.set()
        assert go.wait(60)
        return real(name, **options)

    monkeypatch.setattr(TideKV, "from_pretrained", load)
    handle, errors = EngineHandle(EngineSpec("missing"), EnginePool()), []

    def want() -> None:
        try:
            handle.engine()
        except ModelNotFoundError as error:
            errors.append(error)

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    go.set()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    with pytest.raises(ModelNotFoundError):
        handle.engine()
    assert len(loads) >= 2


def test_weights_go_with_their_last_handle_even_without_close(tiny: str) -> None:
    handle, other = EngineHandle(EngineSpec(tiny)), EngineHandle(EngineSpec(tiny))
    weights = weakref.ref(handle.engine().model)
    assert other.engine().model is weights()
    del handle
    gc.collect()
    assert weights() is not None
    del other
    gc.collect()
    assert weights() is None


def test_a_closed_handle_is_refused_everywhere(loads: list[str]) -> None:
    handle = EngineHandle(EngineSpec("one"), EnginePool())
    handle.close()
    for use in (handle.engine, handle.tokenizer, handle.join, lambda: run(handle, lambda *_: pytest.fail("ran"))):
        with pytest.raises(ClosedError):
            use()


def test_a_request_that_is_given_up_leaves_the_line(loads: list[str]) -> None:
    pool, go = EnginePool(most_loaded=1), threading.Event()
    handle = EngineHandle(EngineSpec("one"), pool)
    assert pool.line is not None

    def wait(engine: Any, emit: Any, cancel: threading.Event) -> Any:
        emit(Delta("begun"))
        assert go.wait(60)
        raise RuntimeError("over")

    running = iterate(handle, wait)
    assert next(running) == Delta("begun")
    with pytest.raises(RequestTimeoutError, match=r"timeout=0\.01"):
        run(handle, lambda *_: pytest.fail("ran"), timeout=0.01)
    while pool.line.waiting > 1:
        pass
    go.set()
    with pytest.raises(RuntimeError, match="over"):
        next(running)
