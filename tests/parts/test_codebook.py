"""The scalar codebook codec: golden codes, any order of levels, norms, padding, and products."""

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.codecs.codebook import ScalarCodebook
from veloxquant_mlx.codecs.levels import lloyd_max, residual_levels
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.transforms.rotation import rotation

BITS = [1, 2, 3, 4, 5, 6, 8]
DIMS = [64, 80, 96, 128, 256]


def rows(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def lloyd(dim: int, bits: int) -> ScalarCodebook:
    return ScalarCodebook(dim, lloyd_max(bits), bits)


def sums(bits: int) -> np.ndarray:
    first, second = residual_levels(bits)
    return (first[:, None] + second).reshape(-1)


def test_golden_codes():
    row = np.array([-2, -0.9, -0.1, 0.3, 1.2] + [0.0] * 11, dtype=np.float32)
    row[5:] = np.sqrt((16 - (row * row).sum()) / 11)  # brings the rms to one
    codes = lloyd(16, 2).encode(mx.array(row)[None, None, None])
    assert unpack(codes["words"], 2)[0, 0, 0, :5].tolist() == [0, 1, 1, 2, 3]
    assert int(np.array(codes["words"]).item()) & 0x3FF == 916
    assert codes["rms"].item() == 1.0


@pytest.mark.parametrize("tokens", [1, 200])  # few values and many take different searches
@pytest.mark.parametrize("levels, bits", [(lloyd_max(b), b) for b in BITS] + [(sums(b), 2 * b) for b in (1, 2, 3, 4)])
def test_every_code_is_the_nearest_level_as_given(levels, bits, tokens):
    x = rows((1, 2, tokens, 64), bits)
    codes = ScalarCodebook(64, levels, bits).encode(x)
    z = np.array(x / mx.sqrt((x * x).mean(-1, keepdims=True)))
    distance = np.abs(z[..., None] - levels.astype(np.float32))
    chosen = np.take_along_axis(distance, np.array(unpack(codes["words"], bits))[..., None].astype(np.int64), -1)
    assert (chosen[..., 0] <= distance.min(-1) + 1e-6).all()  # ties within float32 rounding of z


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [*BITS, 7])
def test_products_equal_the_decoded_rows(bits, dim):
    codec = lloyd(dim, bits)
    x = rows((2, 2, 1100, dim), 1)  # more than one tile
    q, p = rows((2, 2, 3, dim), 2), mx.softmax(rows((2, 2, 3, 1100), 3), axis=-1)
    codes = codec.encode(x)
    decoded = codec.decode(codes)
    assert decoded.shape == x.shape and codec.n_tokens(codes) == 1100
    assert codes["words"].shape[-1] * 32 == codec.padded_dim * bits < (dim + 32) * bits
    # float32 sums of at most 1100 terms
    np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits, dim", [(1, 64), (2, 80), (3, 64), (4, 512), (5, 64), (7, 96), (8, 512)])
def test_tables_of_the_query_give_the_same_scores(bits, dim):
    plain, fused = (ScalarCodebook(dim, lloyd_max(bits), bits, fused=on) for on in (False, True))
    codes, q = plain.encode(rows((2, 2, 1100, dim), 1)), rows((2, 2, 12, dim), 2)
    for few in (q[:, :, :1], q[:, :, :5], q):  # the last are too many for tables
        # float32 sums of up to 512 terms in another order
        np.testing.assert_allclose(fused.scores(few, codes), plain.scores(few, codes), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dim", DIMS)
def test_attention_in_the_rotated_basis(dim):
    codec = Transformed(ScalarCodebook(dim, sums(2), 4), rotation(dim, 1))
    x = rows((1, 2, 50, dim), 1)
    q, p = rows((1, 2, 3, dim), 2), mx.softmax(rows((1, 2, 3, 50), 3), axis=-1)
    codes = codec.encode(x)
    decoded = codec.decode(codes)
    np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-5)
    # .0099 of the squared norm is lost at 2 + 2 bits for normal coordinates, 7 % less on the sphere of 64 dimensions
    assert ((decoded - x) ** 2).sum().item() / (x * x).sum().item() == pytest.approx(0.0096, rel=0.08)


@pytest.mark.parametrize("scale", [2.0**-8, 3.0, 2.0**10])
def test_codes_do_not_depend_on_scale(scale):
    codec, x = lloyd(128, 3), rows((1, 2, 20, 128))
    plain, scaled = codec.encode(x), codec.encode(x * scale)
    # float32 rounding may move a value across a threshold: at most a few of 5120
    moved = np.array(unpack(plain["words"], 3)) != np.array(unpack(scaled["words"], 3))
    assert moved.sum() <= (3 if scale == 3.0 else 0)
    np.testing.assert_allclose(scaled["rms"], plain["rms"].astype(mx.float32) * scale, rtol=2.0**-10)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_hard_rows(dtype):
    x = np.random.default_rng(0).normal(size=(1, 1, 6, 80)).astype(np.float32)
    x[0, 0, 0], x[0, 0, 1], x[0, 0, 2], x[0, 0, 3, 7] = 0.0, 65504.0, 1e-7, 6e4
    if dtype != mx.float16:
        x[0, 0, 4] *= 1e30
    codec = Transformed(lloyd(80, 4), rotation(80, 0))
    codes = codec.encode(mx.array(x).astype(dtype))
    for out in (codec.decode(codes, dtype), codec.decode(codes), codec.scores(rows((1, 1, 1, 80)), codes)):
        assert mx.isfinite(out).all()
    assert (codec.decode(codes)[0, 0, 0] == 0).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_keeps_its_dtype(dtype):
    codec = lloyd(64, 4)
    x, q, p = rows((1, 2, 30, 64), 1, dtype), rows((1, 2, 3, 64), 2, dtype), mx.full((1, 2, 3, 30), 1 / 32, dtype=dtype)
    codes = codec.encode(x)
    exact = q.astype(mx.float32) @ codec.decode(codes).swapaxes(-1, -2)
    scores, mixed = codec.scores(q, codes), codec.mix(p, codes)
    assert scores.dtype == mixed.dtype == codec.decode(codes, dtype).dtype == dtype
    # one rounding to bfloat16 (2^-9) of sums of order 30
    np.testing.assert_allclose(scores.astype(mx.float32), exact, atol=2.0**-9 * 40)


def test_cutting_and_bytes():
    codec, x = lloyd(128, 2), rows((1, 8, 40, 128))
    whole, part = codec.encode(x), codec.encode(x[:, :, 7:20])
    cut = codec.cut(whole, 7, 20)
    assert all(mx.array_equal(cut[name], part[name]) for name in codec.layout)
    assert 8 * sum(array.nbytes for array in whole.values()) / x.size == 2 + 16 / 128
    assert ScalarCodebook(80, lloyd_max(3), 3).padded_dim == 96 and ScalarCodebook(80, lloyd_max(2), 2).padded_dim == 80


@pytest.mark.parametrize("levels, bits", [([0.0, 1.0, 2.0], 2), ([0.0, float("nan")], 1), (lloyd_max(2), 9)])
def test_bad_levels_are_refused(levels, bits):
    with pytest.raises(QuantizerConfigError):
        ScalarCodebook(64, levels, bits)
