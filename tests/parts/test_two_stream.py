"""Outlier channels apart: which ones, per sequence and head; any two codecs; what is held."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from veloxquant_mlx.codecs.affine import ChannelAffine
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.codecs.codebook import ScalarCodebook
from veloxquant_mlx.codecs.levels import lloyd_max
from veloxquant_mlx.codecs.sketch import SignSketch, Sketched, projections
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.codecs.two_stream import TwoStream
from veloxquant_mlx.transforms.rotation import rotation

DIMS = [64, 80, 96, 128, 256]
PLANTED = 20.0


def rows(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def planted(shape: tuple[int, ...], n: int, seed: int = 0) -> tuple[mx.array, np.ndarray]:
    """Rows with ``n`` channels 20 times as large, others in every head, and those channels ``(B, H, n)``."""
    rng = np.random.default_rng(seed)
    b, h, _, d = shape
    channels = np.array([[np.sort(rng.permutation(d)[:n]) for _ in range(h)] for _ in range(b)])
    scale = np.ones((b, h, 1, d), np.float32)
    np.put_along_axis(scale, channels[:, :, None], PLANTED, axis=-1)
    return rows(shape, seed + 1) * mx.array(scale), channels


def affine(dim: int, bits: int) -> Codec:
    return ChannelAffine(bits, 32)


def rotated(dim: int, bits: int) -> Codec:
    return Transformed(ScalarCodebook(dim, lloyd_max(bits, dim), bits), rotation(dim, 1))


def sketched(dim: int, bits: int) -> Codec:
    base = ScalarCodebook(dim, lloyd_max(bits - 1, dim), bits - 1)
    return Transformed(Sketched(base, SignSketch(projections(dim, dim, 1, 3))), rotation(dim, 1))


PARTS = {"affine": affine, "rotated": rotated, "sketched": sketched}


def bound(codec: TwoStream, x: mx.array) -> TwoStream:
    return codec.bind(codec.fit(x[:, :, : codec.fit_rows]))


@pytest.mark.parametrize("n", [1, 3, 16])
def test_planted_channels_are_found_in_every_sequence_and_head(n):
    x, channels = planted((2, 3, 64, 64), n)
    codec = TwoStream(affine(64 - n, 2), affine(n, 4), 64, n, 64)
    assert np.array_equal(codec.fit(x)["channels"], channels)


def test_of_equals_the_lower_channels_are_taken():
    x = mx.ones((1, 1, 8, 64)) * mx.where(mx.arange(64) == 40, 2.0, 1.0)
    assert TwoStream(affine(60, 2), affine(4, 4), 64, 4, 8).fit(x)["channels"].tolist() == [[[0, 1, 2, 40]]]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("part", PARTS)
def test_products_equal_the_decoded_rows(part, dim):
    n = dim // 4
    x, _ = planted((2, 2, 1088, dim), 3)  # more than one tile
    codec = bound(TwoStream(PARTS[part](dim - n, 2), PARTS[part](n, 4), dim, n, 64), x)
    codes = codec.encode(x)
    q, p = rows((2, 2, 3, dim), 2), mx.softmax(rows((2, 2, 3, 1088), 3), axis=-1)
    decoded = codec.decode(codes)
    assert decoded.shape == x.shape and codec.n_tokens(codes) == 1088
    # float32 sums of up to 1088 terms, of which a few are 20 times as large
    np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("part", PARTS)
def test_each_stream_is_what_its_codec_makes_of_its_channels(part):
    x, channels = planted((1, 2, 64, 64), 4)
    outlier, inlier = PARTS[part](4, 4), PARTS[part](60, 2)
    codec = bound(TwoStream(inlier, outlier, 64, 4, 64), x)
    decoded = np.array(codec.decode(codec.encode(x)))
    for head in range(2):
        inside = np.setdiff1d(np.arange(64), channels[0, head])
        for own, columns in ((outlier, channels[0, head]), (inlier, inside)):
            part_rows = mx.array(np.array(x)[:, head : head + 1][..., columns])
            np.testing.assert_array_equal(decoded[:, head : head + 1][..., columns], own.decode(own.encode(part_rows)))


@pytest.mark.parametrize("part", ["affine", "rotated"])
def test_scores_are_better_than_one_stream_of_as_many_bits(part):
    """3 of 64 channels 20 times as large: 16 of them at 5 bits and 48 at 2 against all at 3, 2.75 bits against 3."""
    x, _ = planted((1, 4, 256, 64), 3)
    q = rows((1, 4, 8, 64), 5)
    exact = q @ x.swapaxes(-1, -2)

    def error(codec: Codec) -> float:
        return float(mx.square(codec.scores(q, codec.encode(x)) - exact).mean())

    split = bound(TwoStream(PARTS[part](48, 2), PARTS[part](16, 5), 64, 16, 64), x)
    assert error(split) < 0.5 * error(PARTS[part](64, 3))


def test_tokens_are_cut_and_taken():
    x, _ = planted((2, 2, 40, 64), 3)
    codec = bound(TwoStream(rotated(48, 2), rotated(16, 4), 64, 16, 40), x)
    codes = codec.encode(x)
    cut, part = codec.cut(codes, 7, 20), codec.encode(x[:, :, 7:20])
    assert all(mx.array_equal(cut[name], part[name]) for name in codec.layout)
    index = mx.array([[[3, 39, 0]] * 2] * 2)
    taken = codec.take(codes, index)
    assert taken is not None
    assert mx.array_equal(codec.decode(taken), codec.decode(codes)[:, :, mx.array([3, 39, 0])])


def test_blocks_of_both_parts_fit():
    codec = TwoStream(ChannelAffine(2, 16), ChannelAffine(3, 32), 64, 8, 32)
    assert codec.block == 32
    x, _ = planted((1, 2, 96, 64), 3)
    codec = bound(codec, x)
    codes = codec.encode(x)
    middle = codec.cut(codes, 32, 64)
    assert codec.n_tokens(middle) == 32
    assert mx.array_equal(codec.decode(middle), codec.decode(codes)[:, :, 32:64])


def test_held_are_codes_norms_and_two_bytes_per_outlier_channel():
    """The paper's 2.5 bits: (32 * 3 + 96 * 2) / 128 and two float16 norms, and 16 n / T D bits for the list."""
    x = rows((1, 8, 1024, 128))
    codec = TwoStream(rotated(96, 2), rotated(32, 3), 128, 32, 128)
    fitted = codec.fit(x[:, :, :128])
    codes = codec.bind(fitted).encode(x)
    assert 8 * sum(a.nbytes for a in codes.values()) == 2.5 * x.size
    assert 8 * sum(a.nbytes for a in fitted.values()) == 16 * 32 * 8
