"""State at any time, copies, files, and the protocol that mlx_lm acts on."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from tests.matrix import IDS, ROWS, Row, feed, identical, same_state, tensors
from veloxquant_mlx import CacheStateError
from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.observers import EventLog


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_state_at_any_time(row: Row) -> None:
    cache = row.cache()
    mx.eval(cache.state)
    for n in (1, 150, 1, 1):
        feed(cache, tensors(n), [n])
        assert all(isinstance(x, mx.array) for x in cache.state)
        mx.eval(cache.state)


@pytest.mark.covers("deepcopy")
@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("tokens", [0, 20, 250])
def test_copies_are_independent(row: Row, tokens: int) -> None:
    cache, twin = row.cache(), row.cache()
    if tokens:
        for c in (cache, twin):
            feed(c, tensors(tokens), [tokens - 1, 1])
    clone = copy.deepcopy(cache)
    assert same_state(clone, cache) and clone.nbytes == cache.nbytes
    feed(clone, tensors(140, seed=3), [140])
    assert same_state(cache, twin) and cache.offset == tokens
    outs = [feed(c, tensors(70, seed=4), [70]) for c in (cache, twin)]
    assert identical(*outs)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_cache_that_nobody_holds_is_gone_at_once(row: Row) -> None:
    """No part points back at what holds it: memory does not wait until Python looks for cycles."""
    cache = row.cache()
    feed(cache, tensors(250), [249, 1])
    parts = [weakref.ref(part) for part in (cache, cache.store, cache.store.keys, cache.store.values)]
    gc.disable()
    try:
        del cache
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("tokens", [1, 20, 250])
def test_prompt_cache_files(row: Row, tokens: int, tmp_path: Path) -> None:
    """Saved and loaded by mlx_lm's own functions, the cache goes on bit for bit; codes are not made anew."""
    cache = row.cache((1, 2, 80, 64))
    feed(cache, tensors(tokens, (1, 2, 80, 64), dtype=mx.float16), [tokens - 1, 1] if tokens > 1 else [1])
    file = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(file, [cache])
    loaded = next(iter(load_prompt_cache(file)))
    assert type(loaded) is CompressedKVCache and loaded.offset == tokens and loaded.config.method == row.method
    assert same_state(loaded, cache) and loaded.nbytes == cache.nbytes
    more = tensors(45, (1, 2, 80, 64), dtype=mx.float16, seed=8)
    outs = [feed(c, more, [40, *[1] * 5]) for c in (cache, loaded)]
    assert identical(*outs) and same_state(loaded, cache)


@pytest.mark.parametrize("damage", ["no header", "foreign", "newer", "missing arrays", "empty"])
def test_damaged_state_is_refused(damage: str) -> None:
    cache = ROWS[0].cache()
    feed(cache, tensors(200), [200])
    header, *arrays = cache.state
    text = bytes(np.array(header)).decode()
    newer = mx.array(np.frombuffer(text.replace('"format": 2', '"format": 99').encode(), np.uint8))
    state = {
        "no header": arrays,
        "foreign": [mx.zeros((1, 2, 3, 4)), mx.zeros((1, 2, 3, 4)), 3],
        "newer": [newer, *arrays],
        "missing arrays": [header, *arrays[:2]],
        "empty": [],
    }[damage]
    with pytest.raises(CacheStateError):
        CompressedKVCache.from_state(state)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("shared", [False, True])
def test_state_in_the_middle_of_things(row: Row, shared: bool) -> None:
    """What waits to be acted on (rows, queries, the note on finiteness) survives: as if nothing had been saved."""
    cache = row.cache()
    cache.shared = shared
    feed(cache, tensors(200), [199, 1])
    loaded = CompressedKVCache.from_state(cache.state)
    loaded.shared = shared
    outs = [feed(c, tensors(40, seed=3), [1] * 40) for c in (cache, loaded)]
    assert identical(*outs) and same_state(cache, loaded)


def test_state_keeps_the_note_on_rows_that_are_not_finite() -> None:
    cache, data = ROWS[0].cache(), tensors(50)
    cache.update_and_fetch(data.k * float("nan"), data.v)
    with pytest.raises(CacheStateError, match="NaN or infinity"):
        feed(CompressedKVCache.from_state(cache.state), tensors(1), [1])


def test_constants_of_a_store_are_not_made_up() -> None:
    """A rotation that came from a store is not in the state: loading without the store is refused."""
    row = next(r for r in ROWS if r.method == "turboquant_rvq")
    cache = row.cache(store=InMemoryArtifactStore())
    feed(cache, tensors(50), [50])
    with pytest.raises(CacheStateError, match="made with store"):
        CompressedKVCache.from_state(cache.state)


def test_nothing_inherited_does_work() -> None:
    """Every public name of mlx_lm's cache is overridden or hidden; names that mlx_lm acts on look absent."""
    cache = ROWS[0].cache()
    own = set(vars(CompressedKVCache))
    for base in KVCache.__mro__[:-1]:
        public = {name for name in vars(base) if not name.startswith("_")}
        assert public <= own, public - own
    for name in ("to_quantized", "bits", "group_size", "__len__", "__bool__"):
        assert not hasattr(cache, name) and not hasattr(CompressedKVCache, name), name
    assert isinstance(cache, KVCache)
    parameters = inspect.signature(CompressedKVCache.make_mask).parameters
    assert list(parameters) == ["self", "N", "return_array", "window_size"]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_pipeline_parallel_hooks(row: Row) -> None:
    """Models split over machines do ``cache.keys = mx.depends(cache.keys, h)``."""
    cache = row.cache()
    assert cache.keys is None
    feed(cache, tensors(150), [149, 1])
    twin = copy.deepcopy(cache)
    cache.keys = list(mx.depends(cache.keys or [], mx.ones(3) * 2))
    assert same_state(cache, twin)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_observers_see_what_happens(row: Row) -> None:
    log = EventLog()
    cache = row.cache(observers=[log])
    feed(cache, tensors(150), [149, 1])
    seen = log.counts()
    if row.indexes:
        assert not seen
        return
    assert seen.keys() == ({"evict"} if row.drops else {"encode"})
    saved = -sum(e.memory_delta_bytes for e in log.events)
    assert saved > 0 and all(e.elapsed_ms > 0 for e in log.events)
    if not row.drops:
        cache.trim(10)
        assert log.counts()["trim"] == 1
