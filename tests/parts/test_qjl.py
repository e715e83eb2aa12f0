"""QJL: outlier channels apart, unbiased scores, the flush law, bits per number, and options with an effect."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import feed, same_state, stored_bytes, tensors
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.codecs.signs import SplitSketch
from veloxquant_mlx.codecs.sketch import SignSketch, projections
from veloxquant_mlx.core.types import LayerInfo


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def split(dim: int, m: int, outliers: int, m_out: int | None = None, seed: int = 7) -> SplitSketch:
    return SplitSketch(projections(dim, m, seed, 3), outliers, m_out or m)


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), **fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(method="qjl", **fields), LayerInfo(head_dim=shape[2], value_dim=shape[3]))


# ---------------------------------------------------------------------------------------------------------- the codec


@pytest.mark.parametrize("dim, m, outliers", [(64, 64, 4), (80, 100, 8), (96, 96, 1), (128, 256, 8), (256, 64, 40)])
def test_scores_equal_those_of_the_decoded_rows(dim: int, m: int, outliers: int) -> None:
    codec = split(dim, m, outliers, m // 2)
    x = rows((2, 2, 1056, dim), 1) * mx.where(mx.arange(dim) % 9 == 2, 5.0, 1.0)  # more than one tile
    q, p = rows((2, 2, 3, dim), 2), mx.softmax(rows((2, 2, 3, 1056), 3), axis=-1)
    codes = codec.encode(x)
    decoded = codec.decode(codes)
    assert decoded.shape == x.shape and codec.n_tokens(codes) == 1056
    # float32 sums of up to 256 + 64 terms; the largest scores are about 1000
    np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-4, atol=5e-3)
    np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-4, atol=1e-4)


def test_outliers_are_those_of_each_group_and_head() -> None:
    """Planted anew in every group of 32; each part is the plain sketch of its own channels."""
    rng, codec = np.random.default_rng(0), split(64, 64, 3)
    x, planted = np.array(rows((2, 2, 96, 64))), np.zeros((2, 2, 3, 3), int)
    for place in np.ndindex(2, 2, 3):
        planted[place] = np.sort(rng.permutation(64)[:3])
        b, h, g = place
        x[b, h, 32 * g : 32 * g + 32, planted[place]] *= 20
    codes = codec.encode(mx.array(x))
    assert codes["channels"].dtype == mx.uint8 and np.array_equal(codes["channels"], planted)
    plain, out = SignSketch(codec.matrix), x * 0
    for b, h, g in np.ndindex(2, 2, 3):
        for channel in planted[b, h, g]:
            tokens = slice(32 * g, 32 * g + 32)
            out[b, h, tokens, channel] = x[b, h, tokens, channel]
    for part, names in ((x - out, ("signs", "sizes")), (out, ("out_signs", "out_sizes"))):
        own = plain.encode(mx.array(part))
        assert all(mx.array_equal(codes[name], own[n]) for name, n in zip(names, ("signs", "sizes"), strict=True))
    assert codec.cut(codes, 32, 96)["channels"].shape == (2, 2, 2, 3)


def test_of_equals_the_lower_channels_are_outliers() -> None:
    assert split(64, 64, 3).encode(mx.ones((1, 1, 32, 64)))["channels"].tolist() == [[[[0, 1, 2]]]]


def test_unbiased_over_matrices() -> None:
    """As many projections for outliers as for the rest, 400 matrices, 64 pairs."""
    x = rows((1, 1, 32, 32), 1) * mx.where(mx.arange(32) % 8 == 1, 8.0, 1.0)
    q = rows((1, 1, 2, 32), 2)
    codecs = (split(32, 32, 4, 16, seed) for seed in range(400))
    found = np.array(mx.concatenate([codec.scores(q, codec.encode(x)) for codec in codecs], axis=0))[:, 0]
    true = np.array(q @ x.swapaxes(-1, -2))[0, 0]
    # 64 normal deviates of one standard error each, related by the common matrices: 4.5 is 1 in 2000 runs
    assert (np.abs(found.mean(0) - true) < 4.5 * found.std(0) / np.sqrt(400)).all()


def test_splitting_a_dominant_channel_off_restores_the_scores() -> None:
    """One channel 50 times as large, queries orthogonal to it: the score error falls by more than 5 (11.4 measured)."""
    large = mx.arange(128) == 17
    x = rows((1, 1, 2048, 128), 1) * mx.where(large, 50.0, 1.0)
    q = rows((1, 1, 16, 128), 2) * mx.where(large, 0.0, 1.0)
    true = q @ x.swapaxes(-1, -2)

    def measured(codec: Codec) -> tuple[float, float]:
        found = codec.scores(q, codec.encode(x))
        correlation = float(np.corrcoef(np.array(found).ravel(), np.array(true).ravel())[0, 1])
        return float(np.square(np.array(found - true)).mean()), correlation

    (plain, poor), (apart, good) = measured(SignSketch(projections(128, 128, 7, 3))), measured(split(128, 128, 8))
    assert plain / apart > 5
    assert poor < 0.4 and good > 0.6  # .80 without a dominant channel


def test_hard_rows() -> None:
    x = np.zeros((1, 1, 32, 64), np.float32)
    x[0, 0, 1], x[0, 0, 2], x[0, 0, 3, 5], x[0, 0, 4] = 65504.0, 1e-7, 6e4, 1e30
    codec = split(64, 64, 2)
    codes = codec.encode(mx.array(x))
    assert unpack(codes["signs"], 1)[0, 0, 0].tolist() == [1] * 64  # the sign of zero is plus
    decoded, scores = codec.decode(codes), codec.scores(rows((1, 1, 1, 64)), codes)
    assert mx.isfinite(decoded).all() and mx.isfinite(codec.decode(codes, mx.float16)).all()
    assert mx.isfinite(scores).all() and (decoded[0, 0, 0] == 0).all()
    half = codec.scores(rows((1, 1, 1, 64)).astype(mx.float16), codec.encode(rows((1, 1, 32, 64))))
    assert half.dtype == mx.float16 and mx.isfinite(half).all()


# --------------------------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize("tokens, packed", [(128, 0), (159, 0), (160, 32), (191, 32), (300, 160)])
def test_flush_law(tokens: int, packed: int) -> None:
    data, held = tensors(tokens), cache()
    feed(held, data, [tokens])
    for now, then in zip(held.materialize(), (data.k, data.v), strict=True):
        changed = mx.any(now != then, axis=(0, 1, 3))
        assert changed.sum().item() == packed and not changed[packed:].any()


@pytest.mark.parametrize(
    "fields, keys",
    [
        ({}, 1.125),
        ({"jl_dim": 256}, 2.125),
        # m / D + 16 / D, m_out / D + 16 / D, 8 n / (32 D)
        ({"jl_dim": 256, "n_outlier_channels": 8}, 2.125 + 1.125 + 8 * 8 / (32 * 128)),
    ],
)
def test_bits_per_number(fields: dict[str, Any], keys: float) -> None:
    held = cache((1, 2, 128, 128), **fields)
    data = tensors(320, (1, 2, 128, 128), dtype=mx.float16)
    feed(held, data, [320])
    assert held.held_bytes()["packed"] * 8 == 2 * 192 * 128 * (keys + 3.0)


@pytest.mark.parametrize(
    "change",
    [{"bit_width_inlier": 4}, {"jl_dim": 100}, {"n_outlier_channels": 8}, {"residual_length": 64}, {"seed": 1}],
    ids=lambda change: next(iter(change)),
)
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    data, caches = tensors(200), (cache(), cache(**change))
    for held in caches:
        feed(held, data, [200])
    assert not same_state(*caches)


def test_no_outliers_is_the_default() -> None:
    data, caches = tensors(200), (cache(), cache(n_outlier_channels=0))
    for held in caches:
        feed(held, data, [200])
    assert same_state(*caches)


@pytest.mark.parametrize("outliers", [0, 8])
def test_attention_is_that_of_the_stored_rows(outliers: int) -> None:
    data, held = tensors(261, repeats=4), cache(n_outlier_channels=outliers)
    feed(held, data.part(0, 260), [260])
    last = data.part(260, 261)
    held.update_and_fetch(last.k, last.v)
    k, v = (mx.repeat(x, 4, axis=1) for x in held.materialize())
    want = mx.softmax(last.q @ k.swapaxes(-1, -2) * 0.125, axis=-1) @ v
    # float32 sums of 261 terms, scores up to about 30
    np.testing.assert_allclose(held.attend(last.q, scale=0.125), want, rtol=1e-3, atol=1e-4)


def test_standalone_gives_the_same_numbers() -> None:
    data = tensors(200, (1, 1, 64, 64), repeats=1)
    config = KVCacheConfig(method="qjl", head_dim=64, residual_length=32, n_outlier_channels=4)
    alone: Any = KVCacheFactory.create(config)
    layer = cache((1, 1, 64, 64), residual_length=32, n_outlier_channels=4)
    feed(layer, data.part(0, 199), [1] * 199)
    last = data.part(199, 200)
    layer.update_and_fetch(last.k, last.v)
    for k, v in zip(data.k[0, 0], data.v[0, 0], strict=True):
        alone.append_key(k)
        alone.append_value(v)
    want = layer.attend(last.q, scale=64**-0.5)[0, 0, 0]
    np.testing.assert_allclose(alone.attend(last.q[0, 0, 0]), want, rtol=1e-5, atol=1e-6)
    assert stored_bytes(layer) < 200 * 128 * 4


@pytest.mark.parametrize(
    "fields", [{"jl_dim": 0}, {"n_outlier_channels": 64}, {"bit_width_inlier": 7}, {"bit_width_outlier": 3}]
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match=next(iter(fields))):
        KVCacheFactory.create(KVCacheConfig(method="qjl", head_dim=64, **fields))


def test_more_projections_than_channels_only_outside_of_the_builder() -> None:
    with pytest.raises(QuantizerConfigError, match="jl_dim"):
        KVCacheBuilder().with_method("qjl").with_head_dim(64).with_jl_dim(128).build()
    KVCacheFactory.create(KVCacheConfig(method="qjl", head_dim=64, jl_dim=128))
