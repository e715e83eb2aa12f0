"""Product vector quantisation: k-means, indices of any width, every shape of codebook, scores by tables."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.codecs import product
from veloxquant_mlx.codecs.product import (
    entries_of,
    kmeans,
    look_up,
    nearest,
    pack_index,
    tables,
    unpack_index,
)


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def test_kmeans_finds_planted_centres() -> None:
    planted = np.array([[0, 0], [10, 0], [0, 10], [10, 10]], np.float32)
    x = np.repeat(planted, 50, axis=0) + 0.1 * np.random.default_rng(0).normal(size=(200, 2))
    found = kmeans(x, 4, 20, seed=3)
    order = np.lexsort(found.round().T)
    np.testing.assert_allclose(found[order], planted, atol=0.1)
    assert np.array_equal(found, kmeans(x, 4, 20, seed=3)) and found.dtype == np.float32


@pytest.mark.parametrize("d, bits, expected", [(4, 8, 0.0988), (2, 8, 0.0085)])
def test_kmeans_error_on_normal_vectors(d: int, bits: int, expected: float) -> None:
    x = np.random.default_rng(0).normal(size=(1 << 15, d))
    centres = kmeans(x, 1 << bits, 15, seed=0)
    found = (
        product._assign(np.random.default_rng(1).normal(size=(1 << 14, d)).astype(np.float32), centres)[1].mean() / d
    )
    assert found == pytest.approx(expected, rel=0.07)  # 15 sweeps on 128 vectors per centre, other vectors


def test_kmeans_with_fewer_values_than_centres_and_a_start() -> None:
    x = np.repeat(np.array([[1.0, 2.0], [3.0, 4.0]]), 8, axis=0)
    assert {tuple(c) for c in kmeans(x, 4, 5, seed=0).tolist()} == {(1.0, 2.0), (3.0, 4.0)}
    moved = kmeans(x, 2, 5, seed=0, start=np.array([[90.0, 90.0], [0.0, 0.0]]))  # the first centre gets no row at first
    assert sorted(moved.tolist()) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("heads, places", [(1, 1), (3, 1), (1, 8), (3, 8)])
def test_indices_are_the_nearest_entries(heads: int, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "HELD", 1 << 12)  # several pieces
    x, books = rows((2, 3, 40, 32)), rows((heads, places, 16, 4), 1)
    index = nearest(x, books)
    assert index.shape == (2, 3, 40, 8)
    parts = np.array(x).reshape(2, 3, 40, 8, 1, 4)
    every = np.broadcast_to(np.array(books), (3, 8, 16, 4))[None, :, None]
    distance = np.square(parts - every).sum(-1)
    chosen = np.take_along_axis(distance, np.array(index)[..., None].astype(np.int64), -1)[..., 0]
    np.testing.assert_allclose(chosen, distance.min(-1), rtol=1e-4, atol=1e-5)
    decoded = np.array(entries_of(index, books)).reshape(2, 3, 40, 8, 4)
    np.testing.assert_allclose(np.square(decoded - parts[..., 0, :]).sum(-1), chosen, rtol=1e-4, atol=1e-5)
    q = rows((2, 3, 5, 32), 2)
    scores = look_up(tables(q, books), index)
    np.testing.assert_allclose(scores, q @ entries_of(index, books).swapaxes(-1, -2), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("n", [1, 5, 16])
def test_indices_are_packed(bits: int, n: int) -> None:
    index = mx.array(np.random.default_rng(bits).integers(0, 1 << bits, (2, 3, n)))
    stream = pack_index(index, bits)
    assert stream.dtype == mx.uint8 and mx.array_equal(unpack_index(stream, bits, n), index)
    if n == 16:
        assert stream.shape[-1] == 2 * bits
