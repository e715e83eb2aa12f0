"""The sign sketch: its exact constant, no bias over the choice of projections, the stated variance, the store."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.codecs.sketch import SignSketch, projections, sketch_constant
from veloxquant_mlx.core.exceptions import QuantizerConfigError

TAG = 3


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def unit(x: mx.array) -> mx.array:
    return x / mx.sqrt((x * x).sum(-1, keepdims=True))


def independent(dim: int, m: int, seed: int = 9) -> mx.array:
    return rows((m, dim), seed)


def sketch(dim: int, m: int, orthogonal: bool = True) -> SignSketch:
    return SignSketch(projections(dim, m, 7, TAG) if orthogonal else independent(dim, m), orthogonal)


def test_golden_constants():
    assert sketch_constant(64) == pytest.approx(1.24843, abs=5e-6)
    assert sketch_constant(128) == pytest.approx(1.25087, abs=5e-6)
    assert sketch_constant(128, orthogonal=False) == pytest.approx(1.253314, abs=5e-7)
    assert sketch_constant(128) / 128 == pytest.approx(0.0097725, abs=1e-7)
    assert sketch_constant(1) == pytest.approx(1.0)  # one number of known size and sign


@pytest.mark.parametrize("dim, m", [(64, 64), (80, 80), (128, 100), (64, 200)])
def test_projections_are_orthogonal_in_blocks(dim, m):
    matrix = np.array(projections(dim, m, 7, TAG), dtype=np.float64)
    assert matrix.shape == (m, dim)
    for start in range(0, m, dim):
        block = matrix[start : start + dim]
        np.testing.assert_allclose(block @ block.T, dim * np.eye(len(block)), atol=1e-4 * dim)
    assert not np.allclose(matrix, projections(dim, m, 8, TAG)) and not np.allclose(matrix, projections(dim, m, 7, 4))
    assert np.array_equal(matrix, np.array(projections(dim, m, 7, TAG)))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("m", [64, 100])
def test_products_equal_the_decoded_rows(dim, m):
    codec = sketch(dim, m)
    x, q = rows((2, 2, 1100, dim), 1), rows((2, 2, 3, dim), 2)
    codes = codec.encode(x)
    assert codes["signs"].shape[-1] == -(-m // 32)
    expected = q @ codec.decode(codes).swapaxes(-1, -2)
    many = mx.concatenate([q] * 4, axis=2)  # too many query rows for tables: decoded tiles
    # float32 sums of m terms of order 1
    np.testing.assert_allclose(codec.scores(q, codes), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(codec.scores(many, codes)[:, :, :3], expected, rtol=1e-4, atol=1e-3)
    signs = np.array(unpack(codes["signs"], 1, m))
    np.testing.assert_array_equal(signs, np.array(x @ codec.matrix.T >= 0))


@functools.cache
def turns(dim: int = 32, count: int = 4000) -> np.ndarray:
    """Haar rotations ``(count, dim, dim)``."""
    q, r = np.linalg.qr(np.random.default_rng(3).normal(size=(count, dim, dim)))
    return (q * np.where(np.diagonal(r, axis1=1, axis2=2) < 0, -1.0, 1.0)[:, None]).astype(np.float32)


def estimates(dot: float, m: int) -> np.ndarray:
    """Of the product ``dot`` of two unit vectors, for 4000 rotations of both: as good as 4000 matrices."""
    q, k = np.eye(32, dtype=np.float32)[:2]
    k = dot * q + np.sqrt(1 - dot**2) * k
    codec = sketch(32, m)
    queries, keys = (mx.array((turns() @ x)[:, None, None]) for x in (q, k))
    return np.array(codec.scores(queries, codec.encode(keys)))[:, 0, 0, 0]


@pytest.mark.parametrize("m", [20, 32, 64])
@pytest.mark.parametrize("dot", [0.0, 0.5, -0.9])
def test_orthogonal_projections_are_unbiased(dot, m):
    found = estimates(dot, m)
    assert abs(found.mean() - dot) < 4 * found.std() / np.sqrt(found.size)
    assert found.var() * m < np.pi / 2 - dot**2  # less than with independent rows
    if dot == 0 and m % 32 == 0:  # whole blocks
        assert found.var() * m == pytest.approx(np.pi / 2 - 1, rel=0.09)  # 4 sd of the variance of 4000 samples


def test_independent_projections_are_unbiased_with_the_stated_variance():
    pairs, m, count = 16, 48, 600
    q, k = unit(rows((1, pairs, 1, 32), 1)), unit(rows((1, pairs, 1, 32), 2))
    codecs = (SignSketch(independent(32, m, 100 + seed), orthogonal=False) for seed in range(count))
    found = np.array(mx.concatenate([codec.scores(q, codec.encode(k)) for codec in codecs]))[:, :, 0, 0]
    dots = np.array((q * k).sum(-1)).reshape(-1)
    assert (abs(found.mean(0) - dots) < 4 * found.std(0) / np.sqrt(count)).all()
    # (pi/2 - <q, k>^2) / m; the pairs see the same matrices: about 600 * 16 / 3 samples
    assert (found.var(0) * m).mean() == pytest.approx(np.pi / 2 - (dots**2).mean(), rel=0.06)


CORRELATION = {64: (0.496, 0.562), 128: (0.632, 0.800), 256: (0.755, 0.883), 384: (0.814, 0.918), 512: (0.848, 0.936)}


@pytest.mark.parametrize("m", CORRELATION)
@pytest.mark.parametrize("orthogonal", [False, True])
def test_correlation_with_the_true_scores(m, orthogonal):
    k, q = unit(rows((1, 1, 2000, 128), 1)), unit(rows((1, 1, 40, 128), 2))
    codec = sketch(128, m, orthogonal)
    found, true = codec.scores(q, codec.encode(k)), q @ k.swapaxes(-1, -2)
    got = np.corrcoef(np.array(found).reshape(-1), np.array(true).reshape(-1))[0, 1]
    assert got == pytest.approx(CORRELATION[m][orthogonal], abs=0.015)  # one matrix: about 2 / sqrt(40 * m) of scatter


@pytest.mark.parametrize("scale", [2.0**-8, 2.0**6])
def test_signs_do_not_depend_on_scale(scale):
    codec, x = sketch(128, 128), rows((1, 2, 20, 128))
    plain, scaled = codec.encode(x), codec.encode(x * scale)  # a power of two: exact
    assert mx.array_equal(plain["signs"], scaled["signs"])
    np.testing.assert_allclose(scaled["sizes"], plain["sizes"].astype(mx.float32) * scale, rtol=2.0**-10)


def test_hard_rows():
    x = np.zeros((1, 1, 4, 64), np.float32)
    x[0, 0, 1], x[0, 0, 2], x[0, 0, 3, 5] = 65504.0, 1e-7, 6e4
    codec = sketch(64, 64)
    codes = codec.encode(mx.array(x))
    assert unpack(codes["signs"], 1)[0, 0, 0].tolist() == [1] * 64  # the sign of zero is plus
    decoded, scores = codec.decode(codes), codec.scores(rows((1, 1, 1, 64)), codes)
    assert mx.isfinite(decoded).all() and mx.isfinite(scores).all()
    assert (decoded[0, 0, 0] == 0).all() and scores[0, 0, 0, 0] == 0


def test_a_store_keeps_projections():
    store = InMemoryArtifactStore()
    fresh = projections(64, 96, 5, TAG)
    assert mx.array_equal(projections(64, 96, 5, TAG, store), fresh)
    assert mx.array_equal(projections(64, 96, 5, TAG, store), fresh)
    keys = [key for key in store._arrays if key.startswith("jl-d64-m96")]
    assert len(keys) == 1
    other = projections(64, 96, 6, TAG)
    store._arrays[keys[0]] = np.array(other)
    assert mx.array_equal(projections(64, 96, 5, TAG, store), other)
    for wrong in (np.ones((96, 64), np.float32), np.array(other)[:64], np.full((96, 64), np.nan, np.float32)):
        store._arrays[keys[0]] = wrong
        with pytest.raises(QuantizerConfigError, match=r"d=64, m=96.*Remove"):
            projections(64, 96, 5, TAG, store)


@pytest.mark.parametrize("m", [0, -1, 2.0, True, None])
def test_bad_sizes_are_refused(m: Any):
    with pytest.raises(QuantizerConfigError, match="rows=.*at least 1"):
        projections(64, m, 0, TAG)
