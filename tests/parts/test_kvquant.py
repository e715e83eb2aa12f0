"""KVQuant: levels fitted to the data, ranges per channel and per token, sparse outliers, fits and refits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.matrix import feed, same_state, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.nonuniform import ChannelLevels, Refitted, TokenLevels, fit_levels
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import probe_rotation

BOTH = [ChannelLevels, TokenLevels]


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def channels(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    """Rows whose channels have means and spreads of their own."""
    lead = (*shape[:2], 1, shape[3])
    return rows(shape, seed) * mx.exp(rows(lead, seed + 1)) + 3 * rows(lead, seed + 2)


def codec(kind: type[ChannelLevels] | type[TokenLevels], x: mx.array, bits: int = 3, fraction: float = 0.01) -> Any:
    made = kind(bits, dim=x.shape[-1], fraction=fraction, sweeps=8, fit_rows=min(x.shape[2], 256))
    return made.bind(made.fit(x[:, :, : made.fit_rows]))


def cache(shape: tuple[int, int, int, int] = (1, 2, 64, 64), rope: Any = None, **fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(method="kvquant", **fields)
    return CompressedKVCache(config, LayerInfo(head_dim=shape[2], value_dim=shape[3], rope=rope))


def rounded(x: np.ndarray, levels: Any) -> np.ndarray:
    levels = np.array(levels, dtype=np.float64)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]


# ---------------------------------------------------------------------------------------------------------- the levels


@pytest.mark.parametrize("bits, expected", [(2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_lloyd_on_a_gaussian(bits: int, expected: float) -> None:
    x = np.random.default_rng(0).normal(size=1 << 18)
    levels = np.array(fit_levels(mx.array((x / 6).astype(np.float32)), bits, 60)) * 6
    assert ((rounded(x, levels) - x) ** 2).mean() == pytest.approx(expected, rel=0.02)


def test_every_sweep_helps() -> None:
    x = np.random.default_rng(0).laplace(size=1 << 16)
    x = (x / np.quantile(x, 0.995)).astype(np.float32)
    x = x[np.abs(x) <= 1]
    errors = [((rounded(x, fit_levels(mx.array(x), 4, sweeps)) - x) ** 2).mean() for sweeps in range(1, 12)]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(errors))
    assert errors[7] < 1.05 * errors[-1]  # the default of 8 sweeps


@pytest.mark.parametrize("name, uniform, fitted", [("normal", 0.045, 0.026), ("t", None, 0.087)])
def test_fitted_levels_against_even_ones(name: str, uniform: float | None, fitted: float) -> None:
    """3 bits, 1 % of the numbers removed. Even levels over everything: 0.155 and 21."""
    random = np.random.default_rng(0)
    x = random.normal(size=1 << 18) if name == "normal" else random.standard_t(3, 1 << 18)
    low, high = np.quantile(x, [0.005, 0.995])
    u = 2 * (x - low) / (high - low) - 1
    inside, unit = np.abs(u) <= 1, (high - low) / 2
    levels = fit_levels(mx.array(u.astype(np.float32)), 3, 30)  # numbers outside do not count
    error = ((rounded(u[inside], levels) - u[inside]) ** 2).mean() * unit**2
    assert error == pytest.approx(fitted, rel=0.03)
    if uniform is not None:
        even = ((rounded(u[inside], np.linspace(-1, 1, 8)) - u[inside]) ** 2).mean() * unit**2
        assert even == pytest.approx(uniform, rel=0.03)


def test_few_and_equal_numbers() -> None:
    assert mx.array_equal(fit_levels(mx.array([0.5]), 1, 8), mx.array([0.0, 0.5]))
    assert (fit_levels(mx.zeros(100), 3, 8) == 0).any()
    assert mx.isfinite(fit_levels(mx.full(100, 7.0), 3, 8)).all()  # no number inside


# ---------------------------------------------------------------------------------------------------------- the codecs


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_every_code_is_the_nearest_level(kind: type, bits: int) -> None:
    """Two sequences with levels of their own."""
    x = channels((2, 3, 256, 80))
    made = codec(kind, x, bits, fraction=0)
    codes = made.encode(x)
    every = made._fitted | codes
    u = np.array((x - every["offset"]) / every["width"].astype(mx.float32))
    chosen = np.array(unpack(codes["words"], bits)[..., :80])
    for b in range(2):
        levels = np.array(every["levels"].astype(mx.float32))[b].reshape(-1)
        distance = np.abs(u[b][..., None] - levels)
        picked = np.take_along_axis(distance, chosen[b][..., None].astype(np.int64), -1)[..., 0]
        assert (picked <= distance.min(-1) + 1e-6).all()  # ties within the rounding of u


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1])
def test_channel_ranges_are_quantiles(fraction: float) -> None:
    x = channels((1, 2, 256, 64))
    fitted = codec(ChannelLevels, x, fraction=fraction)._fitted
    low, high = np.quantile(np.array(x), [fraction / 2, 1 - fraction / 2], axis=2)
    # float16 keeps 11 bits
    np.testing.assert_allclose(np.array(fitted["offset"])[:, :, 0], (low + high) / 2, rtol=2.0**-11, atol=1e-4)
    np.testing.assert_allclose(np.array(fitted["width"])[:, :, 0], (high - low) / 2, rtol=2.0**-11)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "h, dim, fraction, count", [(8, 128, 0.01, 11), (3, 80, 0.01, 3), (1, 96, 0.3, 29), (1, 100, 0.07, 7)]
)
def test_entries_of_a_token(kind: type, h: int, dim: int, fraction: float, count: int) -> None:
    """A fixed number for every token, all heads together; what they name is exact to float16."""
    x = channels((2, h, 300, dim))
    made = codec(kind, x, fraction=fraction)
    codes = made.encode(x)
    index = np.array(codes["sparse_index"])[:, 0].astype(np.int64)
    assert index.shape == (2, 300, count) and codes["sparse_index"].dtype == mx.uint16
    assert (np.diff(np.sort(index, axis=-1), axis=-1) > 0).all()
    wide, back = (np.array(a.swapaxes(1, 2).reshape(2, 300, -1)) for a in (x, made.decode(codes)))
    error = np.take_along_axis(np.abs(wide - back), index, -1)
    value = np.array(codes["sparse_values"])[:, 0].astype(np.float32)
    used = np.ones(value.shape, dtype=bool) if kind is TokenLevels else value != 0
    assert (error <= 2.0**-11 * np.abs(value) + 1e-5)[used].all()
    if kind is ChannelLevels:
        assert used.any() and not used.all()


def test_outliers_of_keys_lie_outside_their_channel() -> None:
    """By range, not by size: a large channel at rest has none, a small one that jumps does."""
    x = rows((1, 2, 256, 64)) * mx.where(mx.arange(64) == 5, 100.0, 1.0)
    made = codec(ChannelLevels, x)
    later = mx.where((mx.arange(64) == 9) & (mx.arange(2)[:, None, None] == 1), 20.0, x[:, :, :32] * 0.5)
    codes = made.encode(later)
    assert ((codes["sparse_index"] == 64 + 9) & (codes["sparse_values"] != 0)).any(axis=-1).all()
    assert ((codes["sparse_values"] != 0).sum(axis=-1) == 1).all()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits, fraction", [(1, 0.01), (2, 0.0), (3, 0.05), (5, 0.01)])
def test_products_equal_the_decoded_rows(kind: type, dim: int, bits: int, fraction: float) -> None:
    x = channels((2, 2, 150, dim))
    q, p = rows((2, 2, 3, dim), 5), mx.softmax(rows((2, 2, 3, 150), 6), axis=-1)
    made = codec(kind, x, bits, fraction)
    codes = made.encode(x)
    decoded = made.decode(codes)
    assert decoded.shape == x.shape and made.n_tokens(codes) == 150
    np.testing.assert_allclose(made.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(made.mix(p, codes), p @ decoded, rtol=1e-4, atol=1e-4)
    cut = made.cut(codes, 32, 96)
    assert mx.array_equal(made.decode(cut), decoded[:, :, 32:96])


@pytest.mark.parametrize("kind", BOTH)
def test_extreme_rows_stay_finite(kind: type) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 64, 64)).astype(np.float32)
    x[0, 0, 3], x[0, 0, :, 5], x[0, 1, 0, 0], x[0, 1, 1, 1], x[0, 1, 2, 2] = 0.0, 1e4, 65504, -65504, 3e38
    made = codec(kind, mx.array(x))
    codes = made.encode(mx.array(x))
    for out in (made.decode(codes), made.decode(codes, mx.float16), made.mix(mx.full((1, 2, 1, 64), 1 / 64), codes)):
        assert mx.isfinite(out).all()


@pytest.mark.parametrize("kind", BOTH)
def test_blocks_keep_their_own_tables(kind: type) -> None:
    """Fitted anew where the text changes: an early block is what it was, a late one is served by its own levels."""
    early, late = channels((1, 2, 256, 64)), channels((1, 2, 256, 64), 40) * 3
    made = kind(3, dim=64, fraction=0.01, sweeps=8, fit_rows=128)
    blocks, once = Refitted(made, 128), made.bind(made.fit(early[:, :, :128]))
    x = mx.concatenate([early, late], axis=2)
    codes = blocks.encode(x)
    assert blocks.n_tokens(codes) == 512 and codes["levels"].shape == (1, 1, 4, 8)
    assert mx.array_equal(blocks.decode(blocks.cut(codes, 0, 128)), once.decode(once.encode(early[:, :, :128])))
    anew, kept = (mx.square(c.decode(c.encode(x)) - x)[:, :, 256:].mean() for c in (blocks, once))
    assert mx.all(anew < (0.5 if kind is ChannelLevels else 1.02) * kept)
    np.testing.assert_allclose(blocks.decode(codes), blocks.decode(blocks.encode(x)), atol=0)


# ---------------------------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize("tokens", [1, 256, 257, 288, 289])
def test_what_stays_exact(tokens: int) -> None:
    """The first token for ever, everything until the fit, and what does not fill a block of 32 yet."""
    data, held = tensors(tokens), cache()
    feed(held, data, [tokens])
    changed = 0 if tokens < 257 else (tokens - 1) // 32 * 32
    for now, then in zip(held.materialize(), (data.k, data.v), strict=True):
        assert mx.any(now != then, axis=(0, 1, 3)).tolist() == [0 < i <= changed for i in range(tokens)]


def test_bits_per_element_of_the_specification() -> None:
    """K 3.355, V 3.379 with 11 entries per token of 1024 channels, for 4096 tokens (and the sink)."""
    shape, tokens = (1, 8, 128, 128), 4097
    held = cache(shape)
    data = tensors(tokens, shape, 1, dtype=mx.float16)
    held.update_and_fetch(data.k, data.v)
    held.attend(data.q[:, :, -1:], scale=0.125)
    levels, sink = 2 * 2**3, 2 * 1024
    used = [sum(a.nbytes for a in s.arrays().values()) for s in (held._store.keys, held._store.values)]
    k, v = (8 * (n - levels) / (4096 * 1024) for n in used)
    assert (k, v) == pytest.approx((3.355, 3.379), abs=6e-4)
    token = 1024 * 3 // 8 + 11 * 4
    assert used == [4096 * token + 4 * 1024 + levels + sink, 4096 * (token + 4) + levels + sink]


@pytest.mark.parametrize(
    "change",
    [
        {"kvquant_bits": 2},
        {"kvquant_outlier_fraction": 0.0},
        {"kvquant_group_size": 64},
        {"kvquant_lloyd_iters": 1},
        {"kvquant_refit_interval": 96},
        {"kvquant_n_sink": 0},
        {"n_calib_tokens": 100},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    data, caches = tensors(300), (cache(), cache(**change))
    for held in caches:
        feed(held, data, [300])
    assert not same_state(*caches)


@pytest.mark.parametrize("size", [1, 50, 299])
def test_refits_do_not_depend_on_chunks(size: int) -> None:
    data = tensors(300, (2, 2, 64, 64))
    whole, pieces = (cache(kvquant_refit_interval=96) for _ in range(2))
    feed(whole, data, [300])
    feed(pieces, data, [size] * (300 // size) + ([300 % size] if 300 % size else []))
    assert same_state(whole, pieces) and whole.materialize()[0].shape[2] == 300
    assert whole.trim(150) == 150
    feed(whole, tensors(200, (2, 2, 64, 64), seed=9), [199, 1])
    assert whole.offset == 350 and mx.isfinite(whole.materialize()[0]).all()


@pytest.mark.parametrize("keep", [257, 200, 20, 1, 0])
def test_trim_into_the_fit(keep: int) -> None:
    """The fit stays with the codes that need it, and is forgotten with the last of them."""
    data, held = tensors(300), cache()
    feed(held, data, [300])
    before = held.materialize()
    held.trim(300 - keep)
    if keep:
        for now, then in zip(held.materialize(), before, strict=True):
            assert mx.allclose(now, then[:, :, :keep], atol=1e-5)
    more = tensors(300, seed=7)
    feed(held, more, [299, 1])
    keys = held.materialize()[0]
    assert keys.shape[2] == keep + 300
    assert mx.all(mx.square(keys[:, :, keep:] - more.k).mean() < 0.05 * mx.var(more.k, axis=2).mean())


def test_keys_are_stored_before_their_positions() -> None:
    """The range of a channel is narrow before the rotation, which smears its mean over the pair."""
    rope = nn.RoPE(64, base=10000.0)
    raw = rows((1, 2, 300, 64)) * 0.5 + 6 * rows((1, 2, 1, 64), 1)
    data = tensors(300)
    data = type(data)(data.q, rope(raw), data.v)
    known, unknown = cache(rope=probe_rotation(rope, 64)), cache()
    errors = []
    for held in (known, unknown):
        feed(held, data, [300])
        errors.append(mx.square(held.materialize()[0] - data.k).mean())
    assert mx.all(errors[0] < 0.1 * errors[1])
    fit = "levels fitted on the first 256 tokens of the text itself, without gradients"
    assert list(known.describe()["notes"]) == [fit]
    assert "as they come" in str(unknown.describe()["notes"])


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"kvquant_refit_interval": 100}, "kvquant_refit_interval"),
        ({"kvquant_refit_interval": 8, "kvquant_group_size": 8}, "kvquant_refit_interval"),
        ({"kvquant_refit_interval": 96, "n_calib_tokens": 64}, "n_calib_tokens"),
        ({"n_calib_tokens": 15}, "n_calib_tokens"),
        ({"kvquant_bits": 6}, "kvquant_bits"),
        ({"kvquant_outlier_fraction": 0.5}, "kvquant_outlier_fraction"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=field):
        KVCacheFactory.create(KVCacheConfig(method="kvquant", **fields))
