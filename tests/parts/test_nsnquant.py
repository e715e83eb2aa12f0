"""NSNQuant: normalised windows, errors, the universal codebook, bits per number, the flush law, options."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from scipy import stats

from tests.matrix import feed, same_state, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.nsn import NSN
from veloxquant_mlx.codecs.product import entries_of, nearest
from veloxquant_mlx.codecs.universal import universal_codebook
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods.nsnquant import turn
from veloxquant_mlx.models.probe import probe_rotation
from veloxquant_mlx.models.rope import Rotation, UnknownRotation

SMALL: dict[str, Any] = {"nsn_codebook_size": 16, "nsn_subvector_dim": 4}  # a codebook that is made in no time


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def codec(dim: int = 128, window: int = 64, bits: int = 2) -> NSN:
    return NSN(dim, window, universal_codebook(256, 8, bits == 2, 1234), bits == 2, turn(dim, 1234))


def cache(
    shape: tuple[int, int, int, int] = (1, 2, 64, 64), rope: Rotation | UnknownRotation | None = None, **fields: Any
) -> CompressedKVCache:
    layer = LayerInfo(head_dim=shape[2], value_dim=shape[3], rope=rope)
    return CompressedKVCache(KVCacheConfig(method="nsnquant", **fields), layer)


def means() -> mx.array:
    """Two channels with means of 20 and -10, as keys have them."""
    channel = mx.arange(128)
    return mx.where(channel == 5, 20.0, mx.where(channel == 77, -10.0, 0.0))


# ---------------------------------------------------------------------------------------------------------- the codec


def test_windows_are_normal_whatever_they_were() -> None:
    """Rows of all sizes with large means: rms one, means within the rounding of 4 bits, and a normal distribution."""
    x = (rows((1, 4, 512, 128)) + means()) * mx.exp(rows((1, 4, 512, 1), 2) / 4)
    one = codec()
    z, spread, codes = one.normalise(x)
    np.testing.assert_allclose(mx.sqrt(mx.square(z).mean(-1)), 1, rtol=1e-5)
    step = codes["shift_ends"].astype(mx.float32)[..., :1]
    # half a step, and what float16 loses of the low end
    assert mx.all(mx.abs((z * spread).mean(-2)) <= 0.5 * step * (1 + 2e-3) + 2e-3)
    turned = np.array(one.transform.forward(z)).ravel()
    assert stats.kstest(turned, stats.norm.cdf).statistic < 0.01
    assert stats.kstest(np.array(one.transform.forward(x)).ravel(), stats.norm.cdf).statistic > 0.2


@pytest.mark.parametrize("bits, error, cosine, price", [(2, 0.0947, 0.952, 2.2265625), (1, 0.3219, 0.8231, 1.2265625)])
def test_errors_and_bits(bits: int, error: float, cosine: float, price: float) -> None:
    one, x = codec(bits=bits), rows((1, 4, 512, 128))
    codes = one.encode(x)
    assert 8 * sum(a.nbytes for a in codes.values()) / x.size == price
    decoded = one.decode(codes)
    # The figures are the codebook's alone, of one trained on fewer vectors; a window's mean takes 1/64 of the error.
    assert mx.square(decoded - x).mean().item() == pytest.approx(error * 63 / 64, rel=0.025)
    found = (decoded * x).sum(-1) / mx.sqrt(mx.square(decoded).sum(-1) * mx.square(x).sum(-1))
    assert found.mean().item() == pytest.approx(cosine, abs=0.006)  # likewise


def test_large_means_cost_nothing() -> None:
    """0.0954 of the variance with 4-bit sizes and shifts; without the shift it would be 0.47."""
    one, x = codec(), rows((1, 4, 512, 128)) + means()
    assert mx.square(one.decode(one.encode(x)) - x).mean().item() == pytest.approx(0.0954, rel=0.03)  # as above
    size = mx.sqrt(mx.square(x).mean(-1, keepdims=True))
    z = one.transform.forward(x / size)
    c = entries_of(nearest(mx.abs(z), one.book), one.book) * mx.where(z >= 0, 1.0, -1.0)
    c = c * (z * c).sum(-1, keepdims=True) / mx.square(c).sum(-1, keepdims=True)
    assert (mx.square(c - z) * mx.square(size)).mean().item() == pytest.approx(0.47, rel=0.1)


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_one_row_of_another_size_spoils_nothing(scale: float) -> None:
    one, x = codec(), rows((1, 4, 512, 128)) * mx.where(mx.arange(512) % 64 == 9, scale, 1.0)[:, None]
    error = mx.square(one.decode(one.encode(x)) - x).sum(-1) / mx.square(x).sum(-1)
    # .0947, and the scatter of 32 rows
    assert mx.all(error.mean() < 0.0965) and mx.all(error[..., 9::64].mean() < 0.0985)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim, window", [(64, 64), (80, 64), (96, 10), (128, 1), (256, 33), (20, 7)])
def test_products_equal_the_decoded_rows(dim: int, window: int, bits: int) -> None:
    n = 1100 // window * window  # more than one tile
    one, x = codec(dim, window, bits), rows((2, 2, n, dim), 1) * 2 + 1
    q, p = rows((2, 2, 9, dim), 2), mx.softmax(rows((2, 2, 3, n), 3), axis=-1)
    codes = one.encode(x)
    decoded = one.decode(codes)
    assert decoded.shape == x.shape and one.n_tokens(codes) == n
    expected = q @ decoded.swapaxes(-1, -2)
    # float32 sums of at most 1100 terms
    np.testing.assert_allclose(one.scores(q, codes), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(one.scores(q[:, :, :3], codes), expected[:, :, :3], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(one.mix(p, codes), p @ decoded, rtol=1e-4, atol=1e-4)
    cut = one.cut(codes, window, 3 * window)
    assert all(mx.array_equal(cut[name], a) for name, a in one.encode(x[:, :, window : 3 * window]).items())


def test_hard_rows() -> None:
    x = np.random.default_rng(0).normal(size=(1, 6, 64, 64)).astype(np.float32)
    x[0, 0], x[0, 1], x[0, 2, 3] = 0.0, 7.0, 0.0
    x[0, 3, 5], x[0, 4, 5], x[0, 5, 0, 0] = 65504.0, 1e-7, 1e30
    one = codec(64)
    codes = one.encode(mx.array(x))
    decoded = one.decode(codes)
    q, p = rows((1, 6, 1, 64)), mx.full((1, 6, 1, 64), 1 / 64)
    for out in (decoded, one.decode(codes, mx.float16), one.scores(q, codes), one.mix(p, codes)):
        assert mx.isfinite(out).all()
    assert (decoded[0, 0] == 0).all() and (decoded[0, 2, 3] == 0).all()
    np.testing.assert_allclose(decoded[0, 1], x[0, 1], rtol=2e-3)  # float16 sizes; nothing is left after the shift


def test_the_shipped_codebooks() -> None:
    for signed in (True, False):
        book = universal_codebook(256, 8, signed, 1234)
        assert book.shape == (256, 8) and book.dtype == np.float16 and np.isfinite(book).all()
        assert (book.min() > 0) == signed and not book.flags.writeable
    a, b = (universal_codebook(16, 4, True, seed) for seed in (1, 2))
    assert not np.array_equal(a, b)


# --------------------------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize("tokens, packed", [(127, 0), (128, 64), (191, 64), (192, 128)])
def test_flush_law(tokens: int, packed: int) -> None:
    data, held = tensors(tokens), cache()
    feed(held, data, [tokens])
    for now, then in zip(held.materialize(), (data.k, data.v), strict=True):
        changed = mx.any(now != then, axis=(0, 1, 3))
        assert changed.sum().item() == packed and not changed[packed:].any()


@pytest.mark.parametrize(
    "change",
    [
        {"nsn_bits": 1},
        {"nsn_residual_length": 32},
        {"nsn_codebook_size": 32},
        {"nsn_subvector_dim": 8},
        {"nsn_seed": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_option_has_an_effect(change: dict[str, Any]) -> None:
    data, caches = tensors(200), (cache(**SMALL), cache(**{**SMALL, **change}))
    for held in caches:
        feed(held, data, [200])
    assert not same_state(*caches)


def test_the_receipt_tells_real_bits_and_what_has_no_effect() -> None:
    assert "2 bits" not in str(cache().describe()["notes"])
    assert "take 1.5 bits per number, not nsn_bits=2" in str(
        cache(nsn_codebook_size=4, nsn_subvector_dim=4).describe()["notes"]
    )
    assert "nsn_max_ctx=100 has no effect" in str(cache(nsn_max_ctx=100).describe()["notes"])
    data, held = tensors(200), cache(nsn_max_ctx=100)
    feed(held, data, [200])
    assert held.offset == 200  # a hint, never a limit


def test_keys_are_stored_before_their_positions() -> None:
    """Means of channels, which the rotation would spread over a window."""
    rope = nn.RoPE(64, base=10000.0)
    raw = rows((1, 2, 300, 64)) * 0.5 + 6 * rows((1, 2, 1, 64), 1)
    data = tensors(300)
    data = type(data)(data.q, rope(raw), data.v)
    known, unknown = cache(rope=probe_rotation(rope, 64)), cache(rope=UnknownRotation("it depends on the weather"))
    errors = []
    for held in (known, unknown):
        feed(held, data, [300])
        errors.append(mx.square(held.materialize()[0] - data.k).mean().item())
    assert errors[0] < 0.5 * errors[1]
    assert not known.describe()["notes"] and "the weather" in str(unknown.describe()["notes"])


@pytest.mark.parametrize(
    "fields", [{"nsn_bits": 3}, {"nsn_codebook_size": 100}, {"nsn_subvector_dim": 0}, {"bit_width_inlier": 3}]
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(QuantizerConfigError, match=next(iter(fields))):
        KVCacheFactory.create(KVCacheConfig(method="nsnquant", **fields))
