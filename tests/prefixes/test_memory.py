"""Stores in host memory: copies of views, a limit that holds, an int8 form with a known error."""

from __future__ import annotations

import threading

import pytest
import torch

from tidekv_llm.errors import CacheError
from tidekv_llm.prefixes.base import PrefixKey, common_prefix, digest_ids
from tidekv_llm.prefixes.memory import MemoryPrefix
from tidekv_llm.prefixes.pool import PrefixPool

SHAPE = (1, 2, 16, 4)
NBYTES = 2 * 2 * 2 * 16 * 4 * 4


def store_of(number: int, *, layers: int = 2, **options: object) -> MemoryPrefix:
    ids = [number] * 8 + list(range(8))
    store = MemoryPrefix(PrefixKey("m", "n", digest_ids(ids)), ids, layers, **options)  # type: ignore[arg-type]
    for layer in range(layers):
        store.save(layer, torch.randn(SHAPE), torch.randn(SHAPE))
    store.finish()
    return store


def test_a_store_copies_what_the_next_layer_overwrites() -> None:
    buffer = torch.randn(1, 2, 30, 4)
    before = buffer[:, :, :16].clone()
    store = MemoryPrefix(PrefixKey("m", "n", "i"), range(16), 1)
    store.save(0, buffer[:, :, :16], buffer[:, :, :16])
    buffer.zero_()
    assert torch.equal(store.load(0)[0], before)
    assert store.nbytes == 2 * before.nbytes
    with pytest.raises(CacheError, match="layer 1"):
        store.load(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_within_half_a_step_of_its_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(SHAPE).to(dtype), (torch.randn(SHAPE) * 50).to(dtype)
    keys[:, 0, :, 1] *= 100  # an outlier channel costs the other channels nothing
    values[:, 1, 3] *= 100  # nor an outlier token the other tokens
    store = MemoryPrefix(PrefixKey("m", "n", "i"), range(16), 1, int8=True)
    store.save(0, keys, values)
    for got, exact, dim in zip(store.load(0), (keys, values), (2, 3), strict=True):
        assert got.dtype == dtype
        step = exact.float().abs().amax(dim=dim, keepdim=True) / 127
        rounding = exact.float().abs() * torch.finfo(dtype).eps
        assert ((got.float() - exact.float()).abs() <= step * 0.501 + rounding).all()
    assert store.nbytes == 2 * 2 * 16 * 4 + 4 * (2 * 4 + 2 * 16)


def test_int8_of_nothing_but_zeros_is_zero() -> None:
    store = MemoryPrefix(PrefixKey("m", "n", "i"), range(16), 1, int8=True)
    store.save(0, torch.zeros(SHAPE), torch.zeros(SHAPE))
    assert all(torch.equal(tensor, torch.zeros(SHAPE)) for tensor in store.load(0))


def test_a_store_above_the_limit_is_refused_at_its_first_layer() -> None:
    store = MemoryPrefix(PrefixKey("m", "n", "i"), range(16), 10, limit_bytes=NBYTES)
    with pytest.raises(CacheError, match="limit_bytes allows"):
        store.save(0, torch.randn(SHAPE), torch.randn(SHAPE))


def test_the_pool_evicts_the_least_recently_used_and_frees_it() -> None:
    pool = PrefixPool(2 * NBYTES)
    first, second, third = (store_of(number) for number in range(3))
    pool.add(first)
    pool.add(second)
    assert pool.get(first.key) is first
    pool.add(third)
    assert (first.nbytes, second.nbytes, third.nbytes) == (NBYTES, 0, NBYTES)
    assert pool.get(second.key) is None
    assert not second.complete
    pool.limit_bytes = NBYTES
    assert (first.nbytes, pool.nbytes) == (0, NBYTES)
    pool.limit_bytes = 1
    assert pool.nbytes == 0


def test_the_longest_common_prefix_wins_and_models_are_kept_apart() -> None:
    pool = PrefixPool()
    for number in range(3):
        pool.add(store_of(number))
    found = pool.longest("m", [1] * 8 + [0, 1, 2, 50])
    assert found is not None
    assert (found[0].token_ids[0], found[1]) == (1, 11)
    assert pool.longest("m", [9, 9]) is None
    assert pool.longest("another", [1] * 8) is None


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((), (1,), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), (1, 2), 2), ((1, 2, 3), (1, 9, 3), 1), ((5,), (6,), 0)],
)
def test_common_prefix(first: tuple[int, ...], second: tuple[int, ...], expected: int) -> None:
    assert common_prefix(first, second) == common_prefix(second, first) == expected


def test_a_pool_bears_threads() -> None:
    pool = PrefixPool(3 * NBYTES)

    def work(number: int) -> None:
        for turn in range(20):
            store = store_of(number * 100 + turn)
            pool.add(store)
            pool.get(store.key)
            pool.longest("m", store.token_ids)
            pool.remove(store.key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.nbytes == 0
