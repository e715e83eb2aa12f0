"""The three TurboQuant methods: bias, variance, storage, and what every field of them does.

The distortion tables and the theorem's bound are in test_rotation.py, the joint codebooks of rvq in test_levels.py.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import feed, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs import tables
from veloxquant_mlx.codecs.codebook import ScalarCodebook
from veloxquant_mlx.codecs.levels import distortion, lloyd_max
from veloxquant_mlx.codecs.sketch import SignSketch, Sketched, projections
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.codecs.two_stream import TwoStream
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.transforms.rotation import Rotation, haar

MSE, PROD, RVQ = "turboquant_mse", "turboquant_prod", "turboquant_rvq"
DIMS = [64, 80, 96, 128, 256]


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def unit(x: mx.array) -> mx.array:
    return x / mx.sqrt((x * x).sum(-1, keepdims=True))


def cache(method: str, dim: int = 64, **fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(method=method, head_dim=dim, **fields))  # type: ignore[arg-type]


def filled(method: str, tokens: int, dim: int = 64, heads: int = 1, **fields: Any) -> CompressedKVCache:
    """A cache that has encoded ``tokens`` tokens."""
    made = cache(method, dim, **fields)
    made.append(rows((1, heads, tokens, dim), 1), rows((1, heads, tokens, dim), 2))
    made.settle()
    return made


# --------------------------------------------------------------------------------------------- bias and variance


def mse_codec(dim: int, bits: int, seed: int) -> Transformed:
    turn = Rotation(mx.array(haar(dim, seed).astype(np.float32)))
    return Transformed(ScalarCodebook(dim, lloyd_max(bits, dim), bits), turn)


@pytest.mark.parametrize(
    "bits, kept, cosine", [(1, 0.637, 0.80), (2, 0.8825, 0.94), (3, 0.9655, 0.983), (4, 0.9905, 0.995)]
)
def test_mse_shrinks_scores_by_what_it_loses(bits, kept, cosine):
    """The centroid condition: <x, x^> = 1 - D_b for unit vectors; the figures are those of normal coordinates."""
    x = unit(rows((1, 1, 4000, 128)))
    codec = mse_codec(128, bits, 0)
    decoded = codec.decode(codec.encode(x))
    inner, norm = (x * decoded).sum(-1), mx.sqrt((decoded * decoded).sum(-1))
    assert inner.mean().item() == pytest.approx(1 - distortion(lloyd_max(bits, 128), 128), rel=0.002)
    assert inner.mean().item() == pytest.approx(kept, abs=0.004)
    assert (inner / norm).mean().item() == pytest.approx(cosine, abs=0.005)


@functools.cache
def prod_scores(bits: int, orthogonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """True products of 24 pairs of unit vectors of 32 numbers, and their estimates under 400 seeds."""
    dim, pairs, seeds = 32, 24, 400
    q, k = unit(rows((1, pairs, 1, dim), 1)), unit(rows((1, pairs, 1, dim), 2))
    found = []
    for seed in range(seeds):
        matrix = projections(dim, dim, seed, 3) if orthogonal else rows((dim, dim), 1000 + seed)
        codec: Any = SignSketch(matrix, orthogonal)
        if bits > 1:
            turn = Rotation(mx.array(haar(dim, seed).astype(np.float32)))
            codec = Transformed(Sketched(ScalarCodebook(dim, lloyd_max(bits - 1, dim), bits - 1), codec), turn)
        found.append(codec.scores(q, codec.encode(k)))
    return np.array((q * k).sum(-1)).reshape(-1), np.array(mx.concatenate(found))[:, :, 0, 0]


@pytest.mark.parametrize("bits, orthogonal", [(1, True), (2, True), (3, True), (4, True), (1, False), (2, False)])
def test_prod_is_unbiased_with_the_stated_variance(bits, orthogonal):
    true, found = prod_scores(bits, orthogonal)
    error = found.mean(0) - true
    assert (abs(error) < 4 * found.std(0) / np.sqrt(len(found))).all()
    lost = 1.0 if bits == 1 else distortion(lloyd_max(bits - 1, 32), 32)
    # D * Var = (pi/2 - 1) D_{b-1} with orthogonal rows, pi/2 D_{b-1} with independent ones; both less the square of the
    # product with the error, a 32nd on average. 400 seeds that all pairs share: 5 %.
    stated = (np.pi / 2 - orthogonal) * lost
    assert 32 * found.var(0).mean() == pytest.approx(stated - (not orthogonal) * lost / 32, rel=0.1)
    # Theorem 2 of the paper, for independent rows, in expectation.
    assert found.var(0).mean() <= np.sqrt(3) * np.pi**2 / 32 * 4.0**-bits


@pytest.mark.parametrize("bits", [2, 3])
def test_mse_is_biased_where_prod_is_not(bits):
    true, found = prod_scores(bits, True)
    slope = (found.mean(0) @ true) / (true @ true)
    shrunk = 1 - distortion(lloyd_max(bits, 32), 32)
    assert abs(slope - 1) < (1 - shrunk) / 3


def test_size_of_the_sketched_error():
    """The mean square of the error's norm, relative to the row, is the distortion of one bit less."""
    x = rows((1, 1, 2000, 128))
    codec = Sketched(ScalarCodebook(128, lloyd_max(2, 128), 2), SignSketch(projections(128, 128, 0, 3)))
    codes = codec.encode(x)
    gamma = codes["sizes"].astype(mx.float32) / codes["rms"].astype(mx.float32)
    assert (gamma * gamma).mean().item() == pytest.approx(distortion(lloyd_max(2, 128), 128), rel=0.01)
    # A row on the levels leaves nothing to sketch but the rounding of its norm.
    flat = mx.where(mx.arange(64) % 2 == 0, 1.0, -1.0)[None, None, None]
    codec = Sketched(ScalarCodebook(64, [-1.0, 1.0], 1), SignSketch(projections(64, 64, 0, 3)))
    assert np.allclose(codec.decode(codec.encode(flat)), flat, atol=1e-6)


def test_golden_two_bit_codes_as_planes():
    """The high bit of a code is the sign of the outer plane, the low bit that of the inner one."""
    levels = lloyd_max(2)
    outer, inner = (levels[3] + levels[2]) / 2, (levels[3] - levels[2]) / 2
    assert (outer, inner) == (pytest.approx(0.9816, abs=5e-5), pytest.approx(0.5288, abs=5e-5))
    for code, expected in enumerate((-1.5104, -0.4528, 0.4528, 1.5104)):
        assert levels[code] == pytest.approx(expected, abs=5e-5)
        assert levels[code] == pytest.approx((2 * (code >> 1) - 1) * outer + (2 * (code & 1) - 1) * inner)


# ------------------------------------------------------------------------------------------------------- storage

# (method, fields) -> bits per number of keys and of values at a head of 128
STORAGE = [
    (MSE, {}, 2.125, 2.125),
    (MSE, {"bit_width_inlier": 3}, 3.125, 3.125),
    (MSE, {"bit_width_outlier": 3}, 2.5, 2.125),  # the paper's 2.5 bits
    (MSE, {"bit_width_inlier": 3, "bit_width_outlier": 4}, 3.5, 3.125),  # and its 3.5
    (PROD, {"bit_width_inlier": 1}, 1.125, 1.125),
    (PROD, {}, 2.25, 2.125),
    (PROD, {"bit_width_inlier": 8}, 8.25, 8.125),
    (PROD, {"jl_dim": 512}, 5.25, 2.125),
    (RVQ, {"bit_width_inlier": 1}, 2.125, 2.125),
    (RVQ, {}, 4.125, 4.125),
]


@pytest.mark.parametrize("method, fields, keys, values", STORAGE)
def test_bytes_of_4096_tokens(method, fields, keys, values):
    store = filled(method, 4096, 128, heads=2, **fields).store
    lists = sum(a.nbytes for name, a in store.keys.arrays().items() if name.startswith("fitted."))
    assert lists == (2 * 2 * 32 if "bit_width_outlier" in fields else 0)
    assert 8 * (sum(a.nbytes for a in store.keys.arrays().values()) - lists) == keys * 4096 * 2 * 128
    assert 8 * sum(a.nbytes for a in store.values.arrays().values()) == values * 4096 * 2 * 128


@pytest.mark.parametrize("dim", DIMS)
def test_bits_at_other_head_sizes(dim):
    """b + 16 / D for the codebook; b - 1 + m / D + 32 / D with a sketch, whose rows fill words of 32 signs."""
    signs = -(-dim // 32) * 32
    for method, keys in ((MSE, 4 + 16 / dim), (PROD, 2 + signs / dim + 32 / dim)):
        bits = 4 if method == MSE else 3
        store = filled(method, 64, dim, bit_width_inlier=bits).store
        assert 8 * sum(a.nbytes for a in store.keys.arrays().values()) == pytest.approx(keys * 64 * dim)


# -------------------------------------------------------------------------------------------------------- fields


def output(made: CompressedKVCache, tokens: int = 200) -> mx.array:
    dim = made.config.head_dim
    return feed(made, tensors(tokens, (1, 2, dim, dim)), [tokens - 20, *[1] * 20])[:, :, -20:]


@pytest.mark.parametrize("method", [MSE, PROD, RVQ])
@pytest.mark.parametrize("bits, dim", [(1, 64), (2, 80), (3, 80), (4, 64)])
def test_fused_query_dot_decodes_no_key(method, bits, dim, monkeypatch):
    plain, fused = (filled(method, 1100, dim, bit_width_inlier=bits, enable_fused_query_dot=on) for on in (False, True))
    q = rows((1, 1, 4, dim), 3)
    expected = plain.store.keys.scores(q)
    sizes = []
    decode = tables.lookup
    monkeypatch.setattr(tables, "lookup", lambda words, *a: sizes.append(words.shape) or decode(words, *a))
    np.testing.assert_allclose(fused.store.keys.scores(q), expected, rtol=1e-4, atol=1e-3)  # sums in another order
    assert not sizes
    plain.store.keys.scores(q)
    assert sizes or (method == PROD and bits == 1)  # signs are always read through tables on the CPU


@pytest.mark.parametrize("method", [MSE, PROD, RVQ])
def test_vectorized_attend_only_changes_the_path(method):
    plain, reference = cache(method), cache(method, enable_vectorized_attend=False)
    np.testing.assert_allclose(output(plain), output(reference), rtol=1e-4, atol=1e-4)
    assert any("packed" in path for path in plain.describe()["attention"])
    assert reference.describe()["attention"] == ["float32 reference on decoded rows"]


@pytest.mark.parametrize("bits", [1, 2])
def test_more_projections_give_better_scores(bits):
    q, k = rows((1, 1, 8, 64), 3), rows((1, 1, 512, 64), 1)
    errors = []
    for m in (16, 64, 256):
        scores = filled(PROD, 512, bit_width_inlier=bits, jl_dim=m).store.keys.scores(q)
        errors.append(mx.square(scores - q @ k.swapaxes(-1, -2)).mean().item())
    assert errors[0] > 1.5 * errors[1] > 1.5 * 1.5 * errors[2]


def test_projections_are_shared_out_between_the_streams():
    keys = cache(PROD, 128, bit_width_outlier=3, jl_dim=256)._recipe.keys.codec
    assert isinstance(keys, TwoStream)
    sketches = {prefix: part.codec.sketch for prefix, part in keys.parts.items()}  # type: ignore[attr-defined]
    assert {prefix: (s.m, s.dim) for prefix, s in sketches.items()} == {"out_": (64, 32), "in_": (192, 96)}


@pytest.mark.parametrize("method", [MSE, RVQ])
def test_projections_mean_nothing_to_the_others(method):
    with pytest.raises(QuantizerConfigError, match="jl_dim=64"):
        KVCacheFactory.create(KVCacheConfig(method=method, jl_dim=64))


TWO_STREAM = [
    ({"bit_width_outlier": 4}, 16, 4, 128),
    ({"enable_outlier_two_stream": True}, 16, 2, 128),
    ({"bit_width_outlier": 3, "n_outlier_channels": 5}, 5, 3, 128),
    ({"bit_width_outlier": 4, "n_calib_tokens": 40}, 16, 4, 40),
]


@pytest.mark.parametrize("method", [MSE, PROD, RVQ])
@pytest.mark.parametrize("fields, n, bits, tokens", TWO_STREAM)
def test_outlier_fields(method, fields, n, bits, tokens):
    """Keys wait for the fit, then every channel list has n entries; values are never split."""
    made = cache(method, **fields)
    early, late = (rows((1, 2, m, 64), m) for m in (tokens - 1, 1))
    made.append(early, early)
    made.settle()
    assert (made.store.keys.n_sealed, made.store.values.n_sealed) == (0, tokens - 8)
    made.append(late, late)
    made.settle()
    assert made.store.keys.n_sealed == tokens
    arrays = made.store.keys.arrays()
    assert arrays["fitted.channels"].shape == (1, 2, n) and "fitted.channels" not in made.store.values.arrays()
    keys = made._recipe.keys.codec
    assert isinstance(keys, TwoStream)
    outlier = keys.parts["out_"]
    if method == MSE:
        assert outlier.codec.bits == bits  # type: ignore[attr-defined]
    assert made.describe()["notes"] == [
        f"{n} outlier channels of every key head at {bits} bits, found in the first {tokens} tokens"
    ]


def test_what_is_found_first_stays():
    made = cache(MSE, bit_width_outlier=4, n_calib_tokens=32)
    strong = mx.where(mx.arange(64) < 16, 9.0, 1.0)
    for seed, scale in enumerate((strong, strong[::-1])):
        made.append(rows((1, 1, 32, 64), seed) * scale, rows((1, 1, 32, 64), 5))
        made.settle()
    assert made.store.keys.arrays()["fitted.channels"].tolist() == [[list(range(16))]]


def test_more_outliers_than_a_layer_has_channels():
    config = KVCacheConfig(method=MSE, head_dim=64, bit_width_outlier=3, n_outlier_channels=40)
    with pytest.raises(QuantizerConfigError, match=r"n_outlier_channels=40.*< 32"):
        CompressedKVCache(config, LayerInfo(head_dim=32, value_dim=32))


def test_outliers_help_where_there_are_some():
    """A quarter of the channels at 4 bits (2.7 bits in all) against 3 bits for all, on keys with 4 strong channels."""
    data = tensors(300, (1, 2, 64, 64))
    keys = data.k * mx.where(mx.arange(64) % 16 == 3, 4.0, 1.0)  # 20 times as strong, with what tensors() does

    def error(**fields: Any) -> float:
        made = cache(MSE, **fields)
        made.append(keys, data.v)
        made.settle()
        q = data.q[:, ::2, :4]
        return float(mx.square(made.store.keys.scores(q) - q @ keys.swapaxes(-1, -2)).mean())

    assert error(bit_width_inlier=2, bit_width_outlier=4) < 0.7 * error(bit_width_inlier=3)


@pytest.mark.parametrize("bits", [0, 7, 9, 2.0, True])
@pytest.mark.parametrize("method", [MSE, PROD, RVQ])
def test_bad_widths_are_refused(method, bits):
    for fields in ({"bit_width_inlier": bits}, {"bit_width_outlier": bits}):
        with pytest.raises(QuantizerConfigError, match="bit_width_.*must be"):
            KVCacheFactory.create(KVCacheConfig(method=method, **fields))


# --------------------------------------------------------------------------------------------------------- store

KEPT = {MSE: ("rotation", "codebook"), PROD: ("rotation", "codebook", "jl"), RVQ: ("rotation", "codebook")}


def sizes(store: InMemoryArtifactStore) -> set[str]:
    return {key.split("-")[0] for key in store._arrays}


@pytest.mark.parametrize("method", KEPT)
def test_a_store_keeps_and_gives_everything_random_or_fitted(method):
    store = InMemoryArtifactStore()
    first = output(cache(method, store=store))
    assert sizes(store) == set(KEPT[method])
    assert mx.array_equal(output(cache(method, store=store)), first)
    np.testing.assert_allclose(output(cache(method)), first, atol=2e-3)  # the same numbers, as a matrix
    for kind in KEPT[method]:
        changed = InMemoryArtifactStore()
        for key, array in store._arrays.items():
            other = array * np.float32(1.1) if kind == "codebook" else array[..., ::-1].copy()
            changed._arrays[key] = other if key.startswith(kind) else array
        assert not mx.allclose(output(cache(method, store=changed)), first, atol=1e-3), kind


@pytest.mark.parametrize("method", KEPT)
def test_a_codebook_of_another_form_is_refused(method):
    store = InMemoryArtifactStore()
    cache(method, store=store)
    key = next(key for key in store._arrays if key.startswith("codebook"))
    for wrong in (np.zeros(3, np.float32), np.full_like(store._arrays[key], np.nan)):
        store._arrays[key] = wrong
        with pytest.raises(QuantizerConfigError, match="codebook kept for.*Remove it"):
            cache(method, store=store)
