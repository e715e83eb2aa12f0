"""SpectralQuant: bits by water-filling on principal axes, the sketch of the leading ones, the fallback."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import Row, feed, same_state, split, stored_bytes, tensors
from tests.models import tiny
from tests.parts.test_kvtc import RNG, fitted, relative, rows
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.calibrate import fit_artifact
from veloxquant_mlx.codecs.allocation import normal_errors, water_filled
from veloxquant_mlx.codecs.principal import FLOOR, SpectralLevels
from veloxquant_mlx.codecs.sketch import SignSketch, projections, sketch_constant
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods.spectral import WIDTHS, shared
from veloxquant_mlx.transforms.rotation import haar

DECAYS = (0.9, 0.95, 0.98)


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), **fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(method="spectral", **fields)
    return CompressedKVCache(config, LayerInfo(head_dim=shape[2], value_dim=shape[3], kv_heads=shape[1]))


def codec(d_eff: int, pool: int, bits: int = 2, dim: int = 128, **more: Any) -> SpectralLevels:
    return SpectralLevels(dim, shared(d_eff, pool, bits), WIDTHS, **more)


# --------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    "d_eff, pool, least, figures",
    [
        (4, 12, 1, (0.0890, 0.1021, 0.1105)),
        (50, 100, 1, (0.0497, 0.0948, 0.1175)),
        (128, 256, 1, (0.0085, 0.0359, 0.0925)),
        (128, 256, 0, (0.0033, 0.0280, 0.0925)),
        (0, 0, 1, (0.1175, 0.1175, 0.1175)),  # equal bits: no gain at any decay
    ],
)
def test_water_filling_anchors(d_eff: int, pool: int, least: int, figures: tuple[float, ...]) -> None:
    for decay, figure in zip(DECAYS, figures, strict=True):
        variance = decay ** np.arange(128.0)
        bits = np.full(128, 2)
        errors = normal_errors(variance)
        if d_eff:
            bits[:d_eff] = water_filled(errors[:d_eff], pool, least)
            assert bits[:d_eff].sum() == pool and (np.diff(bits[:d_eff]) <= 0).all()
        assert errors[range(128), bits].sum() / variance.sum() == pytest.approx(figure, abs=6e-5)  # four digits


def test_no_more_than_eight_bits() -> None:
    assert water_filled(normal_errors(np.array([4.0, 1.0])), 99).tolist() == [8, 8]
    assert shared(2, 20, 3)(normal_errors(np.ones(4))).tolist() == [8, 8, 3, 3]


# --------------------------------------------------------------------------------------------------------------- codec


def test_scores_on_exact_coefficients() -> None:
    """Parseval: axes are orthogonal, so that a turned query meets turned keys as the query meets the keys."""
    x, q = rows((1, 2, 300, 64), np.linspace(3, 0.1, 64)), rows((1, 2, 4, 64), seed=1)
    basis = codec(4, 8, dim=64).learn(x)["basis"]
    assert mx.allclose((q @ basis) @ (x @ basis).swapaxes(-1, -2), q @ x.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "d_eff, pool, figures", [(4, 12, (0.0890, 0.1021, 0.1105)), (50, 100, (0.0497, 0.0948, 0.1175))]
)
def test_errors_of_decoded_rows(d_eff: int, pool: int, figures: tuple[float, ...]) -> None:
    """The anchors on data: rows have a norm of their own, which is stored, so that it is a few per cent less."""
    for decay, figure in zip(DECAYS, figures, strict=True):
        x = rows((1, 1, 1024, 128), np.sqrt(decay ** np.arange(128)))
        assert 0.92 * figure < relative(fitted(codec(d_eff, pool), x), x) < 1.01 * figure


def test_a_flat_spectrum_and_random_axes_are_turboquant() -> None:
    x = rows((1, 2, 2048, 128))
    flat = relative(fitted(codec(50, 100), x), x)
    assert flat == pytest.approx(0.1160, rel=0.02)
    decayed = rows((1, 1, 1024, 128), np.sqrt(0.95 ** np.arange(128)))
    random = fitted(codec(50, 100, least=2000, seed=3), decayed)
    # Random axes, equal bits: no gain from the spectrum. Equal bits on principal axes: none either.
    for other in (random, fitted(codec(1, 2), decayed)):
        assert relative(other, decayed) == pytest.approx(0.1160, rel=0.06)
    assert np.array_equal(np.array(random._fitted["bits"][0, 0]), np.full(128, 2))
    assert np.allclose(np.array(random._fitted["basis"][0, 0]), haar(128, 3, 0), atol=1e-6)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("m", [0, 4, 40])
def test_products_are_those_of_decoded_rows(dim: int, m: int) -> None:
    x = rows((2, 2, 200, dim), np.linspace(4, 0.05, dim))
    sketch = SignSketch(projections(6, m, 1, 3)) if m else None
    one = fitted(codec(6, 12 if m else 18, dim=dim, sketch=sketch), x)
    codes, q, p = one.encode(x), rows((2, 2, 5, dim), seed=2), mx.softmax(rows((2, 2, 5, 200), seed=3), axis=-1)
    y = one.decode(codes)
    assert mx.allclose(one.scores(q, codes), q @ y.swapaxes(-1, -2), rtol=1e-4, atol=2e-3)
    if not m:
        assert mx.allclose(one.mix(p, codes), p @ y, rtol=1e-4, atol=1e-4)


def test_the_sketch_is_unbiased() -> None:
    """Over seeds, scores are those of keys whose leading coordinates are exact; kappa of 4 dimensions is 1.1781."""
    assert sketch_constant(4) == pytest.approx(1.1781, abs=5e-5)
    x, q = rows((1, 1, 64, 32), np.linspace(3, 0.1, 32)), rows((1, 1, 1, 32), seed=1)
    made = [fitted(codec(4, 8, dim=32, sketch=SignSketch(projections(4, 4, s, 3))), x) for s in range(200)]
    bare = fitted(codec(4, 8, dim=32), x)
    codes = bare.encode(x)
    scores = np.array(mx.concatenate([one.scores(q, one.encode(x)) for one in made]))[:, 0, 0]
    basis, order = bare._fitted["basis"], np.argsort(-np.array(bare._fitted["bits"][0, 0]).astype(int), kind="stable")
    lead = np.flatnonzero(order < 4)
    missed = np.array((x - bare.decode(codes)) @ basis)[..., lead]
    want = np.array(bare.scores(q, codes))[0, 0, 0] + (missed @ np.array(q @ basis)[0, 0, 0, lead])[0, 0]
    deviation = (scores.mean(0) - want) / (scores.std(0) / np.sqrt(len(made)) + 1e-3)
    assert np.abs(deviation).max() < 4.5  # of 64 normal deviations, one in 2000 tests
    plain = np.array(bare.scores(q, codes))[0, 0, 0]
    assert np.abs(scores.mean(0) - want).mean() < 0.3 * np.abs(plain - want).mean()


@pytest.mark.parametrize("kind", ["rank 3", "zeros", "huge"])
def test_edges(kind: str) -> None:
    x = {
        "rank 3": rows((1, 1, 128, 3)) @ rows((1, 1, 3, 64), seed=1),
        "zeros": mx.zeros((1, 1, 128, 64)),
        "huge": rows((1, 1, 128, 64), np.where(np.arange(64) == 9, 9000.0, 1.0)),
    }[kind]
    one = fitted(codec(4, 8, dim=64, sketch=SignSketch(projections(4, 4, 1, 3))), x)
    y = one.decode(one.encode(x), mx.float16)
    assert mx.isfinite(y).all() and (kind != "zeros" or mx.all(y == 0))
    assert mx.all(one._fitted["spread"] >= np.sqrt(FLOOR * 64) * 0.999)
    if kind == "rank 3":
        assert relative(one, x) < 0.05


# -------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize(
    "fields, key_bits, value_bits",
    [
        ({"spectral_val_d_eff": 1}, 256 + 4 + 32, 256 + 16),
        ({"spectral_val_d_eff": 1, "jl_dim": 16}, 256 + 16 + 32, 256 + 16),
        ({"spectral_val_d_eff": 1, "spectral_key_d_eff": 1, "spectral_apply_qjl": False}, 256 + 1 + 16, 256 + 16),
        ({"bit_width_inlier": 1}, 128 + 4 + 32, 128 + 16),
        ({"bit_width_inlier": 8, "spectral_key_d_eff": 8}, 1024 + 8 + 32, 1024 + 16),
    ],
)
def test_bytes_of_a_row(fields: dict[str, Any], key_bits: int, value_bits: int) -> None:
    """b + (m + 32) / D and b + 16 / D bits per number; every width in use ends with a whole byte."""
    c, data = cache((1, 1, 128, 128), n_calib_tokens=64, **fields), tensors(128, (1, 1, 128, 128))
    feed(c, data, [127, 1])
    before, arrays = stored_bytes(c), c.arrays()
    feed(c, tensors(64, (1, 1, 128, 128), seed=4), [1] * 64)
    widths = [n for n in arrays if n.startswith(("k.w", "v.w", "k.signs"))]
    exact, grown = (key_bits + value_bits) / 8, (stored_bytes(c) - before) / 64
    assert exact <= grown < exact + len(widths)
    if fields.get("bit_width_inlier") in (1, 8):
        assert grown == -(-key_bits // 8) + value_bits // 8


def test_fitted_on_the_whole_prompt_however_it_came() -> None:
    data, whole, pieces, first = tensors(301), cache(), cache(), cache(n_calib_tokens=100)
    feed(whole, data, [300, 1])
    feed(pieces, data, [*split(300, 77), 1])
    feed(first, data, [*split(300, 77), 1])
    assert same_state(whole, pieces) and not same_state(whole, first)
    assert whole._store.keys.tail.n == 5 and "prompt" in whole.describe()["notes"][0]
    assert "first 100 tokens" in first.describe()["notes"][0]
    out = whole.attend(data.q[:, :, -1:], scale=0.125)
    assert mx.allclose(out, reference.attention(data.q[:, :, -1:], *whole.materialize(), 0.125, None), atol=1e-4)


def test_options_have_effects() -> None:
    data = tensors(200)
    plain: dict[str, Any] = {"n_calib_tokens": 64}
    made: list[CompressedKVCache] = []
    for fields in (
        {},
        {"spectral_key_d_eff": 9},
        {"spectral_val_d_eff": 9},
        {"spectral_apply_qjl": False},
        {"jl_dim": 9},
    ):
        made.append(cache(**{**plain, **fields}))
        feed(made[-1], data, [200])
    assert all(not same_state(made[0], other) for other in made[1:])
    note = cache(**plain, spectral_val_d_eff=80).describe()["notes"][-1]
    assert "values have 64 directions" in note


@pytest.mark.parametrize(
    "fields",
    [{"spectral_key_d_eff": 0}, {"spectral_key_d_eff": 65}, {"spectral_val_d_eff": 0}, {"bit_width_inlier": 9}],
)
def test_refusals(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match=next(iter(fields))):
        KVCacheFactory.create(KVCacheConfig(**{"method": "spectral", "head_dim": 64, **fields}))


def test_standalone_gives_the_numbers_of_the_layer_cache() -> None:
    data, config = tensors(90, (1, 1, 64, 64), repeats=1), {"n_calib_tokens": 64, "head_dim": 64}
    alone: Any = KVCacheFactory.create(KVCacheConfig(**{"method": "spectral", **config}))
    layer = Row("", "spectral", lambda *_: 0, {"n_calib_tokens": 64}).cache((1, 1, 64, 64))
    layer.shared = True  # the newest row stays as it is until the next
    for i in range(90):
        alone.append_key(data.k[0, 0, i])
        alone.append_value(data.v[0, 0, i])
    out = feed(layer, data, [1] * 90, scale=64**-0.5)
    assert mx.allclose(alone.attend(data.q[0, 0, -1]), out[0, 0, -1], rtol=1e-5, atol=1e-6)
    assert alone.memory_bytes() > 0 and len(alone) == 90


# ----------------------------------------------------------------------------------------------------------- artifacts

MODEL = tiny.build("llama")
TOKENS: Any = tiny.tokens(300)[0].tolist()


@pytest.fixture(scope="module")
def artifact() -> CalibrationArtifact:
    made, told = fit_artifact(MODEL, [TOKENS], "spectral")
    assert "lie along" in told[0]
    return made


def test_axes_of_an_artifact_are_used_at_once(artifact: CalibrationArtifact) -> None:
    config = KVCacheConfig(method="spectral", store=artifact)
    caches: Any = KVCacheBuilder.for_model(MODEL, config, serve_standalone=True)
    MODEL(tiny.tokens(40), cache=caches)
    caches[0].settle()
    assert (
        caches[0]._store.keys.packed.n == 40
        and caches[0].describe()["notes"][0] == "axes from the calibration artifact"
    )
    assert not [name for name in caches[0].arrays() if "fitted" in name]
    energy = np.square(np.array(artifact.layer(0)["model.k_spread"], np.float64)).sum(-1)
    assert np.allclose(energy, 16, rtol=1e-3)  # shares of the mean square of a row of 16


def test_the_name_says_which_axes(artifact: CalibrationArtifact) -> None:
    """An artifact may hold the axes of several models of one shape, each under its name."""
    arrays = {}
    for owner, layer in (("a", 0), ("b", 1)):
        arrays |= {name.replace("model.", f"{owner}."): x for name, x in artifact.layer(layer).items()}
    both, made = CalibrationArtifact("spectral", {0: arrays}), []
    data = tensors(50, (1, 2, 16, 16))
    for owner in ("a", "b"):
        made.append(cache((1, 2, 16, 16), store=both, spectral_model_name=owner, head_dim=16))
        feed(made[-1], data, [50])
    assert not same_state(*made)
    with pytest.raises(QuantizerConfigError, match=r"other\.k_basis"):
        cache((1, 2, 16, 16), store=both, spectral_model_name="other", head_dim=16)


def test_random_axes_differ_by_seed_and_tensor() -> None:
    x = rows((1, 1, 32, 16), RNG(3).uniform(0.1, 2, 16))
    bases = [codec(4, 8, dim=16, least=33, seed=s, tag=t).fit(x)["basis"] for s, t in ((1, 0), (2, 0), (1, 1), (1, 0))]
    assert mx.array_equal(bases[0], bases[3])
    assert not mx.allclose(bases[0], bases[1]) and not mx.allclose(bases[0], bases[2])
