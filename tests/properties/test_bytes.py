"""nbytes is what is held: the formula of the method, and every array reachable from the cache."""

from __future__ import annotations

import copy
import gc
import types
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.matrix import DTYPES, IDS, ROWS, SHAPES, Row, feed, split, stored_bytes, tensors
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.report import cache_report

_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module, str, bytes)


def reachable_bytes(root: Any) -> int:
    """Bytes of all arrays that the interpreter can reach from ``root``: knows nothing of the package's own counts."""
    found: dict[int, Any] = {}
    visited: set[int] = set()
    todo = [root]
    while todo:
        thing = todo.pop()
        if id(thing) in visited or isinstance(thing, _OPAQUE):
            continue
        visited.add(id(thing))
        if isinstance(thing, (mx.array, np.ndarray)):
            found[id(thing)] = thing
            continue
        todo.extend(gc.get_referents(thing))
    return sum(a.nbytes for a in found.values())


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(("size", "tokens"), [*((size, 257) for size in SHAPES), ("D64", 1), ("D64", 31), ("D80", 128)])
def test_formula(row: Row, size: str, tokens: int) -> None:
    shape = SHAPES[size]
    cache = row.cache(shape)
    feed(cache, tensors(tokens, shape, dtype=mx.float16), [tokens])
    cache.end_prefill()
    assert stored_bytes(cache) == row.held(tokens, shape, 2)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_reachable_array_is_counted(row: Row) -> None:
    cache = row.cache()
    assert cache.nbytes == reachable_bytes(cache)
    feed(cache, tensors(200), split(200, 67))
    assert cache.nbytes == reachable_bytes(cache)
    cache.update_and_fetch(*(tensors(1).k, tensors(1).v))
    assert cache.nbytes == reachable_bytes(cache)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_nothing_compressed_is_larger_than_it_was(row: Row, dtype: mx.Dtype) -> None:
    """At 512 tokens, constants apart, no method holds more than the uncompressed rows, an index apart."""
    cache = row.cache()
    feed(cache, tensors(512, dtype=dtype), [511, 1])
    held = cache.held_bytes()
    added = held["index"] + 1 if row.indexes else 0
    assert sum(held.values()) - held["fixed"] - added < 512 * 2 * 2 * 64 * dtype.size


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_active_memory_follows(row: Row) -> None:
    """What MLX says is allocated is what nbytes says (within 5 % and the allocator's rounding per array)."""
    tokens, shape = 2048, (1, 4, 128, 128)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = row.cache(shape)
    feed(cache, tensors(tokens, shape, dtype=mx.float16), [tokens - 1, 1])
    gc.collect()
    grown = mx.get_active_memory() - before
    assert stored_bytes(cache) <= grown <= cache.nbytes * 1.05 + 16384 * 12


def test_report_adds_up() -> None:
    caches = [row.cache() for row in ROWS]
    for cache in caches:
        feed(cache, tensors(160, dtype=mx.float16), [159, 1])
    report = cache_report(caches)
    shared = {id(a): a.nbytes for c in caches for a in c.constants()}
    assert report.nbytes == sum(stored_bytes(c) for c in caches) + sum(shared.values())
    twice = cache_report([caches[0], copy.deepcopy(caches[0])])
    assert twice.nbytes == caches[0].nbytes + stored_bytes(caches[0]) and twice.layers[1].fixed == 0
    batch = cache_report([CompressedBatchCache([caches[0], copy.deepcopy(caches[0])])])
    assert batch.nbytes == twice.nbytes and batch.uncompressed == twice.uncompressed and len(batch.layers) == 1
    assert (batch.layers[0].method, batch.layers[0].tokens) == (ROWS[0].method, 320)
    assert report.uncompressed == len(caches) * 160 * 2 * (64 + 64) * 2
    assert report.ratio == report.uncompressed / report.nbytes
    text = str(report)
    assert all(row.method in text for row in ROWS) and f"{report.ratio:.2f}x smaller" in text
