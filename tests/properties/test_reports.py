"""Faults found by trying to break the package, and entries of the user reports that no other test owns.

One row per case; its id is the report's entry (A5, M4 …) or what was broken.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import Row, feed, identical, same_rows, same_state, split, tensors
from tests.models import tiny
from tests.models.running import FIRST, caches_of, greedy
from veloxquant_mlx import CacheStateError, KVCacheConfig, KVCacheFactory
from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.standalone import StandaloneKVCache
from veloxquant_mlx.transforms.rotation import haar

METHODS = list(FIRST.values())


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of ``work`` in another thread, whose MLX streams are its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    assert found, "the thread raised"
    return found[0]


def two_caches_of_one_state(row: Row) -> None:
    """Written in place, shared buffers would mix two conversations."""
    cache = row.cache()
    feed(cache, tensors(150), [149, 1])
    state, twin = cache.state, copy.deepcopy(cache)
    a, b = CompressedKVCache.from_state(state), CompressedKVCache.from_state(state)
    more, other = tensors(70, seed=5), tensors(70, seed=9)
    for i in range(0, 70, 10):
        feed(a, more.part(i, i + 10), [1] * 10)
        feed(b, other.part(i, i + 10), [1] * 10)
        feed(twin, more.part(i, i + 10), [1] * 10)
    assert same_state(a, twin) and not same_state(a, b)


def configuration_changed_after_building(row: Row) -> None:
    config = KVCacheConfig(method=row.method, head_dim=64, **row.fields)  # type: ignore[arg-type]
    cache, twin = KVCacheFactory.create(config), row.cache()
    if isinstance(cache, StandaloneKVCache):
        cache = cache._cache
        cache.shared = False
    config.capacity, config.enable_vectorized_attend, config.method = 1, False, "streaming_llm"
    outs = [feed(c, tensors(200), [199, 1]) for c in (cache, twin)]
    assert identical(*outs) and same_state(cache, twin)


def turns_in_two_threads(row: Row) -> None:
    """A lazy array belongs to the thread that made it: nothing may be left lazy after a turn."""
    model = tiny.build("llama")

    def turn(tokens: int, caches: list[Any]) -> list[int]:
        return greedy(model, tiny.tokens(tokens)[0], 3, prompt_cache=caches)[0]

    def chat(run: Callable[[Callable[[], list[int]]], list[int]]) -> list[list[int]]:
        caches = caches_of(model, row)
        return [run(partial(turn, tokens, caches)) for tokens in (90, 20, 1)]

    assert chat(lambda work: work()) == chat(elsewhere)


def direct_calls_in_two_threads(row: Row) -> None:
    """The same without mlx_lm's loop, which evaluates ``state``: only the outputs are evaluated."""
    cache, data = row.cache(), tensors(150)
    mx.eval(data.q, data.k, data.v)

    def step(start: int, stop: int) -> None:
        now = data.part(start, stop)
        cache.update_and_fetch(now.k, now.v)
        mx.eval(cache.attend(now.q, scale=0.125, mask="causal" if stop - start > 1 else None))

    step(0, 100)
    elsewhere(lambda: [step(100, 148), step(148, 149)])
    step(149, 150)
    assert cache.offset == 150


def arrays_in_two_threads(row: Row) -> None:
    """The same where the model attends by itself."""
    cache, data = row.cache(), tensors(150)
    mx.eval(data.k, data.v)

    def step(start: int, stop: int) -> None:
        mx.eval(cache.update_and_fetch(data.k[:, :, start:stop], data.v[:, :, start:stop]))

    for start in range(0, 100, 25):
        step(start, start + 25)
    elsewhere(lambda: step(100, 149))
    step(149, 150)
    elsewhere(lambda: mx.eval(cache.state))


def an_observer_that_raises(row: Row) -> None:
    """Its error reaches the caller after the work is done: what is held is what would be held without it."""

    class Broken:
        def on_event(self, event: object) -> None:
            raise LookupError

    cache, twin, data, at, raised = row.cache(observers=[Broken()]), row.cache(), tensors(170), 0, 0
    for n in (149, 1, 10, *[1] * 10):
        now, at = data.part(at, at + n), at + n
        for c in (cache, twin):
            c.update_and_fetch(now.k, now.v)
            try:
                c.attend(now.q, scale=0.125, mask="causal" if n > 1 else None)
            except LookupError:
                raised += 1
    assert (raised or row.indexes) and same_state(cache, twin)  # an index has no events


def a_copy_in_the_middle_of_a_step(row: Row) -> None:
    cache, data, more = row.cache(), tensors(200), tensors(40, seed=5)
    feed(cache, data.part(0, 150), [149, 1])
    now = data.part(150, 200)
    cache.update_and_fetch(now.k, now.v)
    clone = copy.deepcopy(cache)
    for c in (cache, clone):
        c.attend(now.q, scale=0.125, mask="causal")
    assert identical(*(feed(c, more, [1] * 40) for c in (cache, clone))) and same_state(cache, clone)


def a_chat_of_many_turns(row: Row) -> None:
    """M6, O8: prompts of 1 to 70 tokens in steps of 1 to 5; finite, and bounded where the method says so."""
    caches = caches_of(tiny.build("llama"), row)
    model, at = tiny.build("llama"), 0
    for step, n in ((512, 70), (1, 1), (2, 2), (3, 33), (5, 64)):
        _, logprobs = greedy(model, tiny.tokens(n, step)[0], 6, prompt_cache=caches, prefill_step_size=step)
        at += n + 5  # the last answered token has not been fed
        assert np.isfinite(logprobs).all() and {c.offset for c in caches} == {at + 1}
        at += 1
        if row.drops and row.method != "kvzip":  # which drops once, at the end of the first prompt
            assert all(c.positions.shape[-1] <= row.identity + 40 for c in caches)


CASES = (
    two_caches_of_one_state,
    configuration_changed_after_building,
    turns_in_two_threads,
    direct_calls_in_two_threads,
    arrays_in_two_threads,
    an_observer_that_raises,
    a_copy_in_the_middle_of_a_step,
    a_chat_of_many_turns,
)
PAIRS = [(case, row) for case in CASES for row in METHODS if not (case is arrays_in_two_threads and row.queries)]


@pytest.mark.parametrize(("case", "row"), PAIRS, ids=[f"{case.__name__}-{row.method}" for case, row in PAIRS])
def test_every_method(case: Callable[[Row], None], row: Row) -> None:
    case(row)


@pytest.mark.parametrize("row", METHODS, ids=lambda r: r.method)
@pytest.mark.parametrize(("dim", "repeats"), [(1, 6), (40, 7), (112, 6), (160, 7), (512, 6)])
def test_e4_f1_odd_heads(row: Row, repeats: int, dim: int) -> None:
    """Head sizes and groups of query heads that divide by nothing, two sequences: as the fp32 reference."""
    if row.method in ("polar", "vecinfer") and dim % 2:
        pytest.skip("polar coordinates need pairs, and indices whole sub-vectors; both say so")
    if row.indexes:
        pytest.skip("a query reads some rows only; tests/parts/test_a2ats.py")
    if dim == 1 and "bit_width_outlier" in row.fields:
        pytest.skip("outlier channels must leave inliers; it says so")
    shape = (2, 1, dim, dim)
    cache, data = row.cache(shape), tensors(140, shape, repeats)
    feed(cache, data, [33, 95, 1, 11])
    q = data.q[:, :, -1:]
    rows, held = cache.materialize(), cache.positions >= 0  # sequences may keep different numbers of rows
    want = reference.attention(q, *rows, 0.125, held[:, :, None])
    assert mx.allclose(cache.attend(q, scale=0.125), want, rtol=1e-4, atol=1e-4)  # float32 sums in another order


@pytest.mark.parametrize("row", METHODS, ids=lambda r: r.method)
@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 128, 129])
def test_a5_a7_tiny_chunks_at_every_edge(row: Row, tokens: int) -> None:
    data, whole = tensors(tokens), row.cache()
    feed(whole, data, [tokens])
    feed(cache := row.cache(), data, split(tokens, 3))
    for c in (whole, cache):
        c.end_prefill()
    assert same_rows(whole, cache)


def test_a_rotation_from_a_store_is_not_forgotten() -> None:
    """A state cannot hold the store: refused, where the rotation of the seed would decode to something else."""
    store = InMemoryArtifactStore()
    store.save_rotation_matrix(mx.array(haar(64, 7).astype(np.float32)), 64, 42)
    cache = FIRST["turboquant_rvq"].cache(store=store)
    feed(cache, tensors(20), [20])
    with pytest.raises(CacheStateError, match="made with store"):
        CompressedKVCache.from_state(cache.state)


def test_trim_by_a_numpy_integer() -> None:
    """The count of tokens stays a plain int, which a saved header can hold."""
    cache = FIRST["kivi"].cache()
    feed(cache, tensors(40), [40])
    assert cache.trim(np.int64(3)) == 3  # type: ignore[arg-type]
    assert CompressedKVCache.from_state(cache.state).offset == 37
    with pytest.raises(TypeError):
        cache.trim(1.5)  # type: ignore[arg-type]
    assert cache.offset == 37
