"""Kitty's key pages: the two planes, which channels are boosted, the edge cases of the split, storage."""

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.codecs.affine import ChannelAffine
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.codecs.pages import PagedAffine
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods import kitty


def rows(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def integers(codec: ChannelAffine, x: mx.array) -> np.ndarray:
    """Integer codes ``(B, H, D, n)`` of a plain codec."""
    return np.array(unpack(codec.encode(x)["words"], codec.bits))


@pytest.mark.parametrize("low, high", [(2, 4), (1, 2), (1, 4), (3, 8), (4, 6)])
def test_the_planes_recombine_to_the_integer_codes(low: int, high: int) -> None:
    x = rows((2, 2, 128, 40))
    codec = PagedAffine(low, high, 0.25, 32, 64, dim=40)
    codes = codec.encode(x)
    index = np.array(codes["boosted"])
    assert index.shape == (2, 2, 2, 10) and codes["boosted"].dtype == mx.uint8
    below = np.array(unpack(codes["words"], low)).reshape(2, 2, 40, 2, 64).swapaxes(2, 3)
    above = np.zeros_like(below)
    np.put_along_axis(above, index[..., None], np.array(unpack(codes["high"], high - low)), axis=3)
    on = np.zeros((2, 2, 2, 40, 1), bool)
    np.put_along_axis(on, index[..., None], True, axis=3)
    fine, coarse = (
        integers(ChannelAffine(bits, 32), x).reshape(2, 2, 40, 2, 64).swapaxes(2, 3) for bits in (high, low)
    )
    np.testing.assert_array_equal(below + (above << low), np.where(on, fine, coarse))


@pytest.mark.parametrize("fraction, bits", [(0.0, 2), (1.0, 4)])
def test_none_or_all_boosted_is_the_plain_codec(fraction: float, bits: int) -> None:
    x = rows((1, 2, 256, 64))
    plain, codec = ChannelAffine(bits, 32), PagedAffine(2, 4, fraction, 32, 128, dim=64)
    assert mx.array_equal(codec.decode(codec.encode(x)), plain.decode(plain.encode(x)))


def test_boosted_channels_err_by_half_a_step_of_the_high_width() -> None:
    x = rows((1, 2, 128, 64)) * 3 + 5
    codec = PagedAffine(2, 4, 0.25, 32, 128, dim=64)
    codes = codec.encode(x)
    error = np.abs(np.array(codec.decode(codes) - x)).reshape(1, 2, 4, 32, 64).max(3)
    groups = np.array(x).reshape(1, 2, 4, 32, 64)
    span, peak = np.ptp(groups, axis=3), np.abs(groups).max(3)
    index = np.broadcast_to(np.array(codes["boosted"]), (1, 2, 4, 16)).astype(int)
    top = np.full(span.shape, 3.0)
    np.put_along_axis(top, index, 15.0, axis=-1)
    # half a step and the float16 rounding of scale and bias
    assert (error <= span / top / 2 + 2.0**-10 * (peak + span)).all()


class _AnyChannels(PagedAffine):
    """Boosts channels drawn at random."""

    def _strongest(self, groups: mx.array) -> mx.array:
        shape = (*groups.shape[:3], groups.shape[-1])
        return mx.array(np.random.default_rng(1).random(shape).argsort(axis=-1)[..., : self.boosted])


def test_the_strongest_channels_are_the_right_ones() -> None:
    data = tensors(1024, (1, 4, 128, 128))  # a few strong channels
    q, errors = data.q[:, :4, :64], []
    for kind in (PagedAffine, _AnyChannels):
        codec = kind(2, 4, 0.25, 32, 128, dim=128)
        errors.append(mx.square(codec.scores(q, codec.encode(data.k)) - q @ data.k.swapaxes(-1, -2)).mean().item())
    # One channel of 16 is 5 times larger, so its 25-fold error dominates; at random 3 of 4 such stay at 2 bits.
    assert errors[0] < 0.6 * errors[1]


def test_every_page_chooses_anew() -> None:
    x = rows((1, 1, 128, 32))
    x = mx.concatenate(
        [x[:, :, :64] * mx.where(mx.arange(32) == 3, 9, 1), x[:, :, 64:] * mx.where(mx.arange(32) == 20, 9, 1)], 2
    )
    chosen = PagedAffine(2, 4, 1 / 32, 32, 64, dim=32).encode(x)["boosted"]
    assert chosen.tolist() == [[[[3], [20]]]]


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 320])
@pytest.mark.parametrize(
    "low, high, fraction, group, page",
    [(2, 4, 0.25, 32, 128), (2, 4, 0.3, 64, 64), (2, 8, 1.0, 32, 64), (1, 3, 0.5, 16, 32), (3, 5, 0.1, 32, 64)],
)
def test_products_equal_the_decoded_rows(low, high, fraction, group, page, dim) -> None:
    x, q = rows((2, 2, 384, dim), 1), rows((2, 2, 3, dim), 2)
    codec = PagedAffine(low, high, fraction, group, page, dim=dim)
    codes = codec.encode(x)
    decoded, p = codec.decode(codes), mx.softmax(rows((2, 2, 3, 384), 3), axis=-1)
    assert decoded.shape == x.shape and codec.n_tokens(codes) == 384
    # float32 sums of at most 384 terms
    np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-5, atol=2e-4)
    np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-5)
    half = codec.scores(q.astype(mx.float16), codes)
    assert half.dtype == mx.float16 and mx.allclose(half, codec.scores(q, codes), rtol=2e-3, atol=0.1)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_extreme_input_stays_finite(dtype: mx.Dtype) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 64, 64)).astype(np.float32)
    x[0, 0, 3], x[0, 0, :, 5], x[0, 1, 0, 0], x[0, 1, 1, 1] = 0.0, 1e4, 65504, -65504
    if dtype != mx.float16:
        x[0, 1, 5, 5], x[0, 1, 6, 6] = 3e38, -3e38
    codec = PagedAffine(2, 4, 0.25, 32, 64, dim=64)
    codes = codec.encode(mx.array(x).astype(dtype))
    for out in (codec.decode(codes), codec.decode(codes, mx.float16), codec.scores(rows((1, 2, 1, 64)), codes)):
        assert mx.isfinite(out).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group, table", [(32, (3.951, 3.508)), (128, (3.225, 2.787))])
def test_storage(group: int, table: tuple[float, float], dim: int) -> None:
    """Bits per number at 4096 tokens, codes and exact rows: the table of the method at D = 128."""
    heads, tokens = 8, 4096
    config = KVCacheConfig(method="kitty", kitty_group_size=group)
    recipe = kitty.recipe(config, LayerInfo(head_dim=dim, value_dim=dim))
    x, bits = rows((1, heads, 256, dim), dtype=mx.float16), []
    for stream in (recipe.keys, recipe.values):
        sealed = stream.n_sealed(tokens)
        assert stream.codec is not None
        codes = sum(a.nbytes for a in stream.codec.encode(x).values()) * sealed // 256
        bits.append(8 * (codes + (tokens - sealed) * heads * dim * 2) / (heads * tokens * dim))
    padded = -(-dim // min(group, -(-dim // 32) * 32)) * min(group, -(-dim // 32) * 32)
    # 31 pages, 96 + 32 exact tokens; one index byte per boosted channel
    assert bits[0] == (3968 * (2 + dim // 4 / dim * 2 + 32 / group + 8 * (dim // 4) / dim / 128) + 128 * 16) / 4096
    assert bits[1] == (3936 * (2 * padded + 32 * padded / min(group, padded)) / dim + 160 * 16) / 4096
    if dim == 128:
        # The table counts an index byte for every channel: 6 bits more per channel and page.
        assert bits[0] + 3968 / 4096 * 6 / 128 == pytest.approx(table[0], abs=5e-4)
        assert bits[1] == pytest.approx(table[1], abs=5e-4)


@pytest.mark.parametrize("tokens", [1, 20, 32, 33, 160, 167, 168])
def test_exact_tokens(tokens: int) -> None:
    """32 sinks, a page that is not full, and the newest values, up to 7 more, stay as they came."""
    store, data = Store(kitty.recipe(KVCacheConfig(method="kitty"), LayerInfo())), tensors(tokens, (1, 2, 128, 128))
    store.append(data.k, data.v, 0)
    store.seal()
    keys, values = store.keys, store.values
    assert keys.sinks.n + keys.tail.n == min(tokens, 32) + max(tokens - 32, 0) % 128
    assert values.n_sealed == max(tokens - 32 - 128, 0) // 8 * 8
    exact = min(tokens, 32)
    assert mx.array_equal(keys.dense(0, exact), data.k[:, :, :exact]) and keys.n == values.n == tokens


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"residual_length": 100}, "residual_length"),
        ({"residual_length": 8, "kitty_group_size": 8}, "residual_length"),  # 2-bit codes of 8 tokens: half a word
        ({"kitty_hi_bit": 1}, "kitty_hi_bit"),
        ({"kitty_hi_bit": 8, "kitty_lo_bit": 1}, "kitty_hi_bit"),
    ],
)
def test_settings_that_do_not_fit_are_refused(fields: dict, name: str) -> None:
    with pytest.raises(QuantizerConfigError, match=f"{name}=.* must be"):
        KVCacheFactory.create(KVCacheConfig(method="kitty", **fields))


@pytest.mark.parametrize("low, high, page", [(4, 2, 128), (2, 4, 100), (2, 4, 0), (2, 4, True)])
def test_the_codec_refuses_too(low: int, high: int, page: int) -> None:
    with pytest.raises(QuantizerConfigError, match="must be"):
        PagedAffine(low, high, 0.25, 32, page, dim=64)
