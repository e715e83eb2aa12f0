"""The sparse part: entries chosen and stored, and products equal to those with the dense difference."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.codecs.sparse import ChannelSparse, Sparse, TokenSparse, extremes, largest

SHAPE = (2, 3, 64, 80)
KINDS: dict[str, Sparse] = {"token": TokenSparse(), "channel": ChannelSparse(32), "whole": ChannelSparse()}
M = 5


def rows(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("sparse", KINDS.values(), ids=KINDS)
def test_the_largest_entries_become_exact(sparse: Sparse) -> None:
    x, dense = rows(), rows(seed=1)
    vectors = sparse.vectors(x - dense)
    assert mx.array_equal(sparse.rows(vectors, x), x - dense)
    codes = sparse.encode(x - dense, largest(mx.abs(vectors), M))
    assert codes["sparse_index"].dtype == mx.uint16 and codes["sparse_values"].dtype == mx.float16
    error = np.abs(np.array(sparse.vectors(sparse.add(dense, codes) - x)))
    before = np.sort(np.abs(np.array(vectors)), axis=-1)
    # float16 rounding of the difference, float32 sum
    assert (np.sort(error, axis=-1)[..., :M] <= 2.0**-11 * before[..., -1:] + 1e-6).all()
    np.testing.assert_allclose(np.sort(error, axis=-1)[..., -1], before[..., -M - 1], atol=1e-6)


@pytest.mark.parametrize("sparse", KINDS.values(), ids=KINDS)
def test_products_equal_the_dense_difference(sparse: Sparse) -> None:
    x, (b, h, n, dim) = rows(), SHAPE
    codes = sparse.encode(x, largest(mx.abs(sparse.vectors(x)), M))
    dense = sparse.add(mx.zeros(SHAPE), codes)
    q, p = rows((b, h, 4, dim), 2), rows((b, h, 4, n), 3)
    # float32 sums of some tens of products of order 1
    np.testing.assert_allclose(sparse.scores(q, codes, n), q @ dense.swapaxes(-1, -2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sparse.mix(p, codes, dim), p @ dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sparse", KINDS.values(), ids=KINDS)
def test_unused_slots_add_nothing(sparse: Sparse) -> None:
    """Zeros, as in the spare room of a buffer."""
    x = rows()
    codes = {name: mx.zeros_like(a) for name, a in sparse.encode(x, largest(sparse.vectors(x), M)).items()}
    assert mx.array_equal(sparse.add(x, codes), x) and not sparse.scores(x[:, :, :2], codes, 64).any()


def test_part_of_a_block() -> None:
    x, sparse = rows(), ChannelSparse()
    codes = sparse.encode(x, largest(mx.abs(sparse.vectors(x)), M))
    whole, part = sparse.add(mx.zeros(SHAPE), codes), sparse.part(codes, 20, 50)
    assert mx.array_equal(sparse.add(mx.zeros((2, 3, 30, 80)), part), whole[:, :, 20:50])
    q = rows((2, 3, 4, 80), 1)
    np.testing.assert_allclose(
        sparse.scores(q, part, 30), sparse.scores(q, codes, 64)[..., 20:50], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("x", [rows((7, 40)), mx.ones((7, 40)), mx.arange(280).reshape(7, 40) * -1.0])
def test_extremes_are_both_ends_and_distinct(x: mx.array) -> None:
    chosen = np.sort(np.array(mx.take_along_axis(x, extremes(x, 6), axis=-1)), axis=-1)
    order = np.sort(np.array(x), axis=-1)
    np.testing.assert_array_equal(chosen, np.concatenate([order[:, :3], order[:, -3:]], axis=-1))
    assert all(len(set(row)) == 6 for row in np.array(extremes(x, 6)))


def test_long_vectors_take_wide_indices() -> None:
    x = rows((1, 1, 70000, 2))
    sparse = ChannelSparse()
    codes = sparse.encode(x, largest(sparse.vectors(x), 2))
    assert codes["sparse_index"].dtype == mx.uint32
    assert mx.array_equal(sparse.add(mx.zeros(x.shape), codes).max((2,)), x.max(2).astype(mx.float16))


def test_numbers_beyond_float16_stay_finite() -> None:
    x = mx.full((1, 1, 2, 32), 3e38)
    codes = TokenSparse().encode(x, largest(TokenSparse().vectors(x), 2))
    assert mx.isfinite(codes["sparse_values"]).all()
