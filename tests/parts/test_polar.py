"""PolarQuant: golden angles and levels, densities, errors, norms, bits per number, fitted codebooks, options."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy import stats

from tests.matrix import feed, same_state, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.artifacts import InMemoryArtifactStore
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.polar import Polar, angle_levels
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.transforms.rotation import rotation


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), **fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(method="polar", **fields), LayerInfo(head_dim=shape[2], value_dim=shape[3]))


# ---------------------------------------------------------------------------------------------------------- the codec


GOLDEN = {
    (2, 1): [0.5000, 1.0708],
    (3, 1): [0.58333, 0.98746],
    (4, 1): [0.64315, 0.92764],
    (2, 2): [0.30976, 0.63398, 0.93681, 1.26104],
    (3, 2): [0.42625, 0.67438, 0.89641, 1.14454],
    (4, 2): [0.52422, 0.70591, 0.86488, 1.04658],
    (2, 3): [0.18845, 0.38000, 0.54826, 0.70723],
    (3, 3): [0.30752, 0.47318, 0.60607, 0.72675],
    (4, 3): [0.42577, 0.55566, 0.65480, 0.74287],
}


@pytest.mark.parametrize("level, bits", GOLDEN)
def test_golden_levels(level: int, bits: int) -> None:
    levels = angle_levels(level, bits)
    expected = np.array(GOLDEN[level, bits])
    assert levels[: len(expected)] == pytest.approx(expected, abs=2e-5)  # printed digits
    assert len(levels) == 1 << bits and levels + levels[::-1] == pytest.approx(np.full(1 << bits, np.pi / 2))


@pytest.mark.parametrize("block, expected", [([3.0, 4.0], (0.927295, 0.0, 5.0)), ([1.0] * 16, (np.pi / 4,) * 2 + (4,))])
def test_golden_blocks(block: list[float], expected: tuple[float, ...]) -> None:
    x = mx.pad(mx.array(block), (0, 16 - len(block)))[None, None, None]
    first, upper, radius = Polar(16, 2)._coordinates(x)
    assert first[0, 0, 0, 0].item() == pytest.approx(expected[0], abs=1e-6)
    assert [level[0, 0, 0, 0].item() for level in upper] == pytest.approx([expected[1]] * 3, abs=1e-6)
    assert radius.item() == pytest.approx(expected[2], rel=1e-6)
    assert [level.shape[-1] for level in (first, *upper)] == [8, 4, 2, 1]


def test_densities_of_rotated_rows() -> None:
    """Angles, their spread and their error at 2 bits are the theory's."""
    x = rows((1, 1, 4000, 128))
    first, upper, _ = Polar(128, 2)._coordinates(rotation(128, 3).forward(x))
    assert stats.kstest(np.array(first).ravel(), stats.uniform(0, 2 * np.pi).cdf).statistic < 0.01
    nodes = np.linspace(0, np.pi / 2, 4001)
    for level, deviation, error in zip(
        (2, 3, 4), (0.3418, 0.2476, 0.1763), (0.009909, 0.006162, 0.003393), strict=True
    ):
        found = np.array(upper[level - 2]).ravel()
        cumulated = np.cumsum(np.sin(2 * nodes) ** (2 ** (level - 1) - 1))
        # 1.63 / sqrt(n) is the 1 % bound for independent angles, 0.01 for the 32000 of level 4
        assert stats.kstest(found, lambda a, c=cumulated: np.interp(a, nodes, c / c[-1])).statistic < 0.01
        assert found.std() == pytest.approx(deviation, rel=0.02)
        assert found.mean() == pytest.approx(np.pi / 4, abs=4 * deviation / np.sqrt(found.size))
        nearest = np.abs(found[:, None] - angle_levels(level, 2)).min(1)
        assert np.square(nearest).mean() == pytest.approx(error, rel=0.03)  # 32000 errors scatter by 1 %


@pytest.mark.parametrize("bits, expected", [(1, 0.115), (2, 0.0321), (3, 0.00852), (4, 0.0022)])
def test_errors_and_bits(bits: int, expected: float) -> None:
    codec, x = Polar(128, bits), rows((1, 2, 1000, 128))
    codes = codec.encode(x)
    assert 8 * sum(a.nbytes for a in codes.values()) / x.size == (8 * (bits + 2) + 7 * bits + 16) / 16
    decoded = codec.decode(codes)
    assert mx.square(decoded - x).sum().item() / mx.square(x).sum().item() == pytest.approx(expected, rel=0.02)
    if bits == 2:
        assert ((decoded * x).sum() / mx.square(x).sum()).item() == pytest.approx(0.984, abs=1e-3)
    lengths = [mx.linalg.norm(y.reshape(-1, 16), axis=-1) for y in (decoded, x)]
    assert mx.abs(lengths[0] / lengths[1] - 1).max() < 1e-3  # a rounding to float16, 2^-11


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("dim", [64, 80, 88, 128, 42])
def test_products_equal_the_decoded_rows(dim: int, bits: int) -> None:
    codec = Transformed(Polar(dim, bits), rotation(dim, 1))
    x = rows((2, 2, 1100, dim), 1)  # more than one tile
    q, p = rows((2, 2, 6, dim), 2), mx.softmax(rows((2, 2, 3, 1100), 3), axis=-1)
    codes = codec.encode(x)
    decoded = codec.decode(codes)
    expected = q @ decoded.swapaxes(-1, -2)
    # float32 sums of at most 1100 terms
    np.testing.assert_allclose(codec.scores(q, codes), expected, rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(codec.scores(q[:, :, :1], codes), expected[:, :, :1], rtol=1e-5, atol=2e-4)  # by tables
    np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-5)
    cut = codec.cut(codes, 7, 20)
    assert all(mx.array_equal(cut[name], a) for name, a in codec.encode(x[:, :, 7:20]).items())


def test_codes_are_the_nearest_angles_on_the_circle() -> None:
    for codec in (
        Polar(2, 2),
        Polar(2, 2).bind({"angles1": mx.linspace(0.5, 6.2, 16)[None], "angles": mx.zeros((1, 0, 4))}),
    ):
        angles = np.linspace(-np.pi, np.pi, 1000)
        x = mx.array(np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32))[None, None]
        found = np.array(codec.decode(codec.encode(x)))[0, 0]
        levels = np.array(codec._angles1[0])
        every = np.stack([np.cos(levels), np.sin(levels)], -1)
        best = np.square(np.array(x)[0, 0][:, None] - every).sum(-1).min(1)
        np.testing.assert_allclose(np.square(found - np.array(x)[0, 0]).sum(-1), best, atol=2e-3)  # a float16 radius


def test_hard_rows() -> None:
    x = np.zeros((1, 1, 6, 80), np.float32)
    x[0, 0, 1], x[0, 0, 2], x[0, 0, 3, 7], x[0, 0, 4] = 65504.0, 1e-7, 6e4, 1e30
    codec = Transformed(Polar(80, 2), rotation(80, 0))
    codes = codec.encode(mx.array(x))
    for out in (codec.decode(codes), codec.decode(codes, mx.float16), codec.scores(rows((1, 1, 1, 80)), codes)):
        assert mx.isfinite(out).all()
    assert (codec.decode(codes)[0, 0, 0] == 0).all()
    scaled = codec.encode(mx.array(x[:, :, 3:4] / 1024))
    assert mx.array_equal(scaled["first"], codes["first"][:, :, 3:4])


# ---------------------------------------------------------------------------------------------------- fitted codebooks


def test_fitted_codebooks_serve_rows_that_are_not_as_supposed() -> None:
    """Codebooks are per sequence: the rows of the second one are as supposed, and its codebooks stay as they are."""
    x = rows((1, 2, 512, 64)) * mx.array(np.geomspace(0.05, 5, 64).astype(np.float32))
    x = mx.concatenate([x + 2.0, rows((1, 2, 512, 64), 4)])
    codec = Polar(64, 2, fit_rows=512)
    fitted = codec.fit(x)
    assert fitted["angles1"].shape == (2, 16) and fitted["angles"].shape == (2, 3, 4)
    bound = codec.bind(fitted)
    own, fixed = (c.decode(c.encode(x)) for c in (bound, codec))
    errors = [mx.square(y - x).sum((1, 2, 3)) for y in (own, fixed)]
    assert errors[0][0] < 0.8 * errors[1][0]
    assert errors[0][1].item() == pytest.approx(errors[1][1].item(), rel=0.01)  # as supposed: nothing to gain
    q = rows((2, 2, 1, 64), 5)
    np.testing.assert_allclose(bound.scores(q, bound.encode(x)), q @ own.swapaxes(-1, -2), rtol=1e-5, atol=2e-4)


def test_fitted_levels_without_angles_stay() -> None:
    fitted = Polar(16, 2, fit_rows=8).fit(mx.ones((1, 1, 8, 16)))
    assert mx.isfinite(fitted["angles1"]).all() and mx.isfinite(fitted["angles"]).all()
    assert all((mx.abs(level - np.pi / 4) < 1e-6).any() for level in fitted["angles"][0])


# --------------------------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize(
    "change", [{"bit_width_inlier": 3}, {"seed": 1}, {"n_calib_tokens": 50}], ids=lambda change: next(iter(change))
)
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    data, caches = tensors(200), (cache(), cache(**change))
    for held in caches:
        feed(held, data, [200])
    assert not same_state(*caches)


def test_nothing_is_packed_before_the_codebooks_are_fitted() -> None:
    data, held = tensors(60), cache(n_calib_tokens=50)
    feed(held, data.part(0, 49), [49])
    assert mx.array_equal(held.materialize()[0], data.k[:, :, :49])
    feed(held, data.part(49, 60), [1, 10])
    # 32 codes of 4 bits, 28 of 2 and 4 radii per row, with room for 64 rows; 16 and 3 * 4 fitted angles
    assert held.held_bytes()["packed"] == 2 * (2 * 64 * (16 + 7 + 8) + 4 * (16 + 12))


@pytest.mark.parametrize("dim, size", [(80, 16), (72, 8), (36, 4), (34, 2)])
def test_smaller_blocks_are_reported(dim: int, size: int) -> None:
    notes = str(cache((1, 1, dim, 64)).describe()["notes"])
    assert (f"every {size} numbers" in notes) == (size < 16) and "values" not in notes


def test_a_store_keeps_rotations_and_codebooks() -> None:
    store, data = InMemoryArtifactStore(), tensors(50)
    plain, kept = cache(), cache(store=store)
    for held in (plain, kept):
        feed(held, data, [50])
    assert all(key.partition("-")[0] in ("rotation", "codebook") for key in store._arrays)
    assert sum("polar" in key for key in store._arrays) == 3
    for a, b in zip(plain.materialize(), kept.materialize(), strict=True):
        np.testing.assert_allclose(a, b, atol=0.5)  # a matrix in place of signs: single codes may move
    store._arrays.update({key: a * 0.9 for key, a in store._arrays.items() if "polar" in key})
    other = cache(store=store)
    feed(other, data, [50])
    assert not np.allclose(other.materialize()[0], kept.materialize()[0], atol=1e-3)


@pytest.mark.parametrize("fields", [{"bit_width_inlier": 7}, {"n_calib_tokens": 0}, {"jl_dim": 64}, {"head_dim": 65}])
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match=next(iter(fields))):
        KVCacheFactory.create(KVCacheConfig(**{"method": "polar", "head_dim": 64, **fields}))
