"""Group affine codecs: error bounds, orientations, extreme input, and products equal to the decoded rows."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.core.exceptions import QuantizerConfigError

BITS = [1, 2, 3, 4, 5, 6, 8]


def rows(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def both(bits: int, group: int, dim: int) -> list[Codec]:
    return [ChannelAffine(bits, group), TokenAffine(bits, group, dim=dim)]


def relative_mse(codec: Codec, x: mx.array) -> float:
    error = np.array(codec.decode(codec.encode(x)) - x)
    return float((error**2).mean() / (np.array(x) ** 2).mean())


@given(
    st.sampled_from(BITS[1:]), st.sampled_from([24, 32, 64]), st.sampled_from([1e-6, 1e-3, 1.0, 300.0]),
    st.sampled_from([0.0, 15.0, -900.0]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_error_is_at_most_half_a_step(bits, group, scale, mean, seed):
    codec = ChannelAffine(bits, group)
    x = rows((1, 2, 2 * codec.block, 4), seed) * scale + mean
    codes = codec.encode(x)
    error = np.abs(np.array(codec.decode(codes) - x, dtype=np.float64)).swapaxes(-1, -2).reshape(1, 2, 4, -1, group)
    step, bias = (np.array(codes[name], dtype=np.float64)[..., None] for name in ("scales", "biases"))
    span = step * ((1 << bits) - 1)
    # Half a step, the float16 rounding of both parameters (2^-25 is half a subnormal), float32 arithmetic.
    bound = step / 2 + 2.0**-11 * (np.abs(bias) + span) + 2.0**-24 + 2.0**-21 * (np.abs(bias) + span)
    assert (error <= bound).all()


@pytest.mark.parametrize(
    "bits, expected", [(1, 0.334), (2, 0.154), (3, 0.0281), (4, 0.0061), (5, 0.0014), (6, 0.00035)]
)
def test_error_on_gaussian_groups_of_32(bits, expected):
    x = rows((1, 4, 1024, 64))
    for codec in both(bits, 32, 64):
        # 8192 groups: the mean of a group's error scatters by about 1 %; the table has two to three digits
        assert relative_mse(codec, x) == pytest.approx(expected, rel=0.04)


def test_keys_with_outlier_channels_want_channel_groups():
    x = np.random.default_rng(0).normal(size=(1, 1, 1024, 128)).astype(np.float32)
    x[..., :6] = x[..., :6] * 12 + 15
    channel, token = (relative_mse(codec, mx.array(x)) for codec in both(2, 32, 128))
    assert channel < 0.6 * token


@pytest.mark.parametrize("value", [0.0, 1.5, -3e4, 65504.0, 2.0**-20])
@pytest.mark.parametrize("bits", BITS)
def test_constant_groups_are_exact(value, bits):
    x = mx.full((1, 2, 32, 64), value, dtype=mx.float16)
    for codec in both(bits, 32, 64):
        assert mx.array_equal(codec.decode(codec.encode(x), mx.float16), x)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("bits", BITS)
def test_extreme_input_stays_finite(bits, dtype):
    x = np.random.default_rng(0).normal(size=(1, 2, 64, 64)).astype(np.float32)
    x[0, 0, 3], x[0, 0, :, 5], x[0, 1, 0, 0], x[0, 1, 1, 1] = 0.0, 1e4, 65504, -65504
    x[0, 1, 2] += 6e4
    if dtype != mx.float16:
        x[0, 1, 5, 5], x[0, 1, 6, 6] = 3e38, -3e38
    x = mx.array(x).astype(dtype)
    for codec in both(bits, 32, 64):
        codes = codec.encode(x)
        for out in (codec.decode(codes), codec.decode(codes, mx.float16), codec.scores(rows((1, 2, 1, 64)), codes)):
            assert mx.isfinite(out).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits, group", [(1, 32), (2, 32), (3, 64), (4, 128), (5, 32), (6, 48), (7, 32), (8, 16)])
def test_products_equal_the_decoded_rows(bits, group, dim):
    x = rows((2, 2, 384, dim), 1)
    q, p = rows((2, 2, 3, dim), 2), mx.softmax(rows((2, 2, 3, 384), 3), axis=-1)
    for codec in both(bits, group, dim):
        codes = codec.encode(x)
        decoded = codec.decode(codes)
        assert decoded.shape == x.shape and codec.n_tokens(codes) == 384
        # float32 sums of at most 384 terms
        np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_queries_keep_their_dtype(dtype):
    x, q = rows((1, 2, 128, 64), 1, dtype), rows((1, 2, 3, 64), 2, dtype)
    for codec in both(4, 32, 64):
        codes = codec.encode(x)
        scores = codec.scores(q, codes)
        exact = q.astype(mx.float32) @ codec.decode(codes).swapaxes(-1, -2)
        assert scores.dtype == dtype and codec.decode(codes, dtype).dtype == dtype
        # accumulated in float32 and rounded once (2^-9 for bfloat16); sums of 64 products of order 1 reach about 30
        np.testing.assert_allclose(scores.astype(mx.float32), exact, atol=2.0**-9 * 40)


def test_encoding_is_blockwise_and_cuts_exactly():
    x = rows((1, 2, 256, 80))
    for codec in both(3, 32, 80):
        whole, part = codec.encode(x), codec.encode(x[:, :, 64:192])
        cut = codec.cut(whole, 64, 192)
        assert all(mx.array_equal(cut[name], part[name]) for name in codec.layout)
        assert codec.n_tokens(cut) == 128
        tiles = codec.tiles(whole, 96)
        assert sum(codec.n_tokens(tile) for tile in tiles) == 256
        assert mx.array_equal(mx.concatenate([codec.decode(tile) for tile in tiles], axis=2), codec.decode(whole))


@pytest.mark.parametrize("bits", BITS)
def test_encoding_decoded_rows_changes_nothing(bits):
    x = rows((1, 2, 64, 64)).astype(mx.float16)
    for codec in both(bits, 32, 64):
        codes = codec.encode(x)
        assert mx.array_equal(codec.encode(codec.decode(codes))["words"], codes["words"])


def test_bytes_follow_the_formula():
    x = rows((1, 8, 256, 128), dtype=mx.float16)
    for codec in both(2, 32, 128):
        bits = 8 * sum(array.nbytes for array in codec.encode(x).values()) / x.size
        assert bits == 2 + 32 / 32
    narrow = TokenAffine(2, 128, dim=64)  # a group that is longer than the row costs no padding
    assert (narrow.group, narrow.padded_dim) == (64, 64)
    assert TokenAffine(2, 32, dim=80).padded_dim == 96


@pytest.mark.parametrize("bits, group", [(0, 32), (9, 32), (True, 32), (2.0, 32), (2, 1), (2, True), (2, "32")])
def test_bad_settings_are_refused(bits, group):
    for build in (lambda: ChannelAffine(bits, group), lambda: TokenAffine(bits, group, dim=64)):
        with pytest.raises(QuantizerConfigError, match="must be"):
            build()
