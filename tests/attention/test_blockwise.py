"""Attention block by block over packed rows: the reference's numbers, and a peak that the history does not raise."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import ROWS, Row, Shape, tensors
from veloxquant_mlx.attention import blockwise, entry, reference
from veloxquant_mlx.cache.store import Store

PACKED = [row for row in ROWS if row.id in ("kivi-2", "kivi-3-8-g16", "kivi-8-r0", "rvq-1", "rvq-3")]
SCALE = 0.125


def store_of(row: Row, tokens: int, shape: Shape = (1, 2, 64, 64)) -> Store:
    """The store of a cache that was fed ``tokens`` rows in chunks and has packed what it can."""
    cache, data = row.cache(shape), tensors(tokens, shape)
    for at in range(0, tokens, 500):
        part = data.part(at, min(at + 500, tokens))
        cache.update_and_fetch(part.k, part.v)
        cache.settle()
        mx.eval(cache.state)
    return cache._store


def queries(length: int, heads: int, batch: int = 1, dim: int = 64, seed: int = 9) -> mx.array:
    return mx.random.normal((batch, heads, length, dim), key=mx.random.key(seed))


def check(store: Store, q: mx.array, mask: mx.array | str | None, sinks: mx.array | None = None) -> None:
    """Against the reference over decoded rows: float32 sums of a few hundred terms of order one, in another order."""
    keys, values = store.keys.dense(dtype=mx.float32), store.values.dense(dtype=mx.float32)
    expected = reference.attention(q, keys, values, SCALE, mask, sinks)
    out = blockwise.attention(store, q, SCALE, mask, sinks)
    assert out.shape == expected.shape and out.dtype == q.dtype
    np.testing.assert_allclose(np.array(out), np.array(expected), atol=2e-5)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and tiles at lengths that tests can afford; neither size divides the lengths."""
    monkeypatch.setattr(blockwise, "BLOCK", 48)
    monkeypatch.setattr(blockwise, "QUERY_ROWS", 20)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("row", PACKED, ids=lambda r: r.id)
@pytest.mark.parametrize(("tokens", "length"), [(161, 33), (200, 200), (97, 1), (131, 41)])
@pytest.mark.parametrize("mask", ["causal", None])
def test_lengths(row: Row, tokens: int, length: int, mask: str | None) -> None:
    check(store_of(row, tokens), queries(length, 4), mask)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("repeats", [1, 3, 4, 8])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_grouped_queries_and_learned_sinks(repeats: int, with_sinks: bool) -> None:
    """Sinks large enough to take most of the weight, and different for every head."""
    heads = 2 * repeats
    sinks = mx.linspace(-3.0, 4.0, heads) if with_sinks else None
    check(store_of(PACKED[0], 170), queries(45, heads), "causal", sinks)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("heads", [None, 1, 2, 6], ids=["2-axes", "shared", "per-kv-head", "per-head"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_array_masks(heads: int | None, kind: str) -> None:
    """Random masks; every query sees at least one row."""
    tokens, length = 170, 45
    shape = (length, tokens) if heads is None else (1, heads, length, tokens)
    seen = mx.random.uniform(shape=shape, key=mx.random.key(5)) < 0.3
    seen = seen | (mx.arange(tokens) == 7)
    mask = seen if kind == "bool" else mx.where(seen, mx.random.normal(shape, key=mx.random.key(6)), -1e9)
    check(store_of(PACKED[0], tokens), queries(length, 6), mask)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "shape", [(2, 3, 80, 80), (1, 1, 192, 128), (2, 1, 64, 80)], ids=["D80", "Dk192-Dv128", "Dv80"]
)
def test_shapes(shape: Shape) -> None:
    for row in (PACKED[0], PACKED[3]):
        check(store_of(row, 150, shape), queries(31, 2 * shape[1], shape[0], shape[2]), "causal")


def test_first_blocks_fully_masked() -> None:
    """A window far behind the oldest rows: blocks without a visible row leave no trace."""
    tokens, length = 1300, 30
    seen = (mx.arange(tokens)[None] > 1200) & (mx.arange(tokens)[None] <= mx.arange(tokens - length, tokens)[:, None])
    check(store_of(PACKED[0], tokens), queries(length, 4), seen)


def test_the_entry_comes_here_with_many_rows_only() -> None:
    store = store_of(PACKED[0], 300)
    for length, path in ((1, entry.Path.PACKED), (64, entry.Path.PACKED), (200, entry.Path.BLOCKWISE)):
        assert entry.attention(store, queries(length, 4), SCALE, "causal", None)[1] is path


def peak(store: Store, q: mx.array) -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(blockwise.attention(store, q, SCALE, "causal", None))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("row", [PACKED[0], PACKED[3]], ids=lambda r: r.id)
def test_peak_does_not_grow_with_the_history(row: Row) -> None:
    """Two blocks of history or sixteen: the same peak, to the allocator's rounding of the running sums.

    A decoded copy of 14 more blocks would be 14 x 512 x (64 + 64) numbers in 2 heads: 7.3 MB.
    """
    q = queries(130, 4)
    few, many = (peak(store_of(row, n * blockwise.BLOCK), q) for n in (2, 16))
    assert many <= few * 1.05 + 65536
    assert few < 2**23  # one block: 2 heads x 512 rows x 256 numbers, scores of 4 heads x 130 x 512, a few of each


@pytest.mark.parametrize("mask", ["causal", None])
def test_products_in_halves(mask: str | None) -> None:
    """float16, as on a GPU for half precision: queries, rows, scores and weights each round by 2**-11 at most."""
    store, q = store_of(PACKED[0], 1300), queries(200, 4)
    keys, values = store.keys.dense(dtype=mx.float32), store.values.dense(dtype=mx.float32)
    expected = reference.attention(q, keys, values, SCALE, mask)
    out = blockwise.attention(store, q.astype(mx.float16), SCALE, mask, None).astype(mx.float32)
    # Scores below 8 err by 8 * 2**-11 and as much again by their factors: a weight by less than 1 in 100.
    assert float(mx.linalg.norm(out - expected)) < 0.01 * float(mx.linalg.norm(expected))
