"""Symmetric rows and anchors with differences: half-step bounds, closed loop, products equal to the decoded rows."""

from __future__ import annotations

import dataclasses
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.matrix import feed, tensors
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.affine import GPU_BITS
from veloxquant_mlx.codecs.anchored import Anchored
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.codecs.symmetric import TokenSymmetric
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods.cachegen import resolved_bits

BITS = [2, 3, 4, 5, 6, 7, 8]


def rows(shape: tuple[int, ...], seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def both(bits: int, dim: int, group: int = 8) -> list[Codec]:
    return [TokenSymmetric(bits, dim=dim), Anchored(bits, group, dim=dim)]


def cache(rank: int = 0, n_layers: int = 1, dim: int = 128, **fields: object) -> CompressedKVCache:
    config = KVCacheConfig(method="cachegen", **fields)  # type: ignore[arg-type]
    return CompressedKVCache(config, LayerInfo(head_dim=dim, value_dim=dim, rank=rank, n_layers=n_layers))


@given(
    st.sampled_from(BITS), st.sampled_from([1e-7, 1e-4, 1.0, 300.0]), st.sampled_from([0.0, 15.0]),
    st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_error_is_at_most_half_a_step(bits: int, scale: float, mean: float, seed: int) -> None:
    """With anchors too: differences are to the decoded anchor, whose error would otherwise be added."""
    x = rows((1, 2, 24, 20), seed) * scale + mean
    # 2^-25 is half the smallest float16; float32 sums and products of numbers up to |x|
    slack = 2.0**-25 + 2.0**-22 * np.abs(np.array(x)).max()
    symmetric, anchored = both(bits, 20)
    codes = symmetric.encode(x)
    steps = np.array(codes["scales"], np.float64)[..., None]
    assert (np.abs(np.array(symmetric.decode(codes) - x, np.float64)) <= steps / 2 + slack).all()
    codes = anchored.encode(x)
    steps = np.concatenate(
        [
            np.array(codes["anchor_scales"], np.float64)[..., None],
            np.array(codes["scales"], np.float64).reshape(1, 2, 3, 7),
        ],
        axis=-1,
    ).reshape(1, 2, 24, 1)
    assert (np.abs(np.array(anchored.decode(codes) - x, np.float64)) <= steps / 2 + slack).all()


def test_differences_follow_the_anchor_that_is_stored() -> None:
    """Tokens equal to their anchor differ from the decoded anchor by its rounding, and come back to half of that step.

    An open loop would store differences of zero and repeat the anchor's error in every token.
    """
    x = mx.broadcast_to(rows((1, 1, 1, 64)) * 100, (1, 1, 16, 64))
    codec = Anchored(4, 16, dim=64)
    error = np.abs(np.array(codec.decode(codec.encode(x)) - x))[0, 0]
    assert error[0].max() > 0.5 and error[1:].max() < error[0].max() / 10


@pytest.mark.parametrize("bits", BITS)
def test_zero_rows_are_exact(bits: int) -> None:
    for codec in both(bits, 64):
        assert mx.array_equal(codec.decode(codec.encode(mx.zeros((1, 2, 16, 64)))), mx.zeros((1, 2, 16, 64)))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("bits", BITS)
def test_extreme_input_stays_finite(bits: int, dtype: mx.Dtype) -> None:
    x = np.random.default_rng(0).normal(size=(1, 2, 16, 64)).astype(np.float32)
    x[0, 0, 3], x[0, 0, :, 5], x[0, 1, 0, 0], x[0, 1, 1, 1] = 0.0, 1e4, 65504, -65504
    if dtype != mx.float16:
        x[0, 1, 8, 5], x[0, 1, 9, 6] = 3e38, -3e38
    for codec in both(bits, 64):
        codes = codec.encode(mx.array(x).astype(dtype))
        for out in (codec.decode(codes), codec.decode(codes, mx.float16), codec.scores(rows((1, 2, 1, 64)), codes)):
            assert mx.isfinite(out).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits, native", [*((b, False) for b in BITS), *((b, True) for b in GPU_BITS)])
def test_products_equal_the_decoded_rows(bits: int, dim: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On decoded rows and, as a GPU would, through quantized_matmul (which has no 7 bits)."""
    monkeypatch.setattr(TokenSymmetric, "_native", lambda self, _: native and self._group is not None)
    x = rows((2, 2, 240, dim), 1)
    q, p = rows((2, 2, 3, dim), 2), mx.softmax(rows((2, 2, 3, 240), 3), axis=-1)
    for codec in both(bits, dim, 10):
        codes = codec.encode(x)
        decoded = codec.decode(codes)
        assert decoded.shape == x.shape and codec.n_tokens(codes) == 240
        # float32 sums of at most 256 terms
        np.testing.assert_allclose(codec.scores(q, codes), q @ decoded.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(codec.mix(p, codes), p @ decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_queries_keep_their_dtype(dtype: mx.Dtype) -> None:
    x, q = rows((1, 2, 128, 64), 1, dtype), rows((1, 2, 3, 64), 2, dtype)
    for codec in both(4, 64):
        codes = codec.encode(x)
        scores = codec.scores(q, codes)
        exact = q.astype(mx.float32) @ codec.decode(codes).swapaxes(-1, -2)
        assert scores.dtype == codec.mix(scores, codes).dtype == dtype and codec.decode(codes, dtype).dtype == dtype
        # accumulated in float32 and rounded once (2^-9 for bfloat16); sums of 64 products of order 1 reach about 30
        np.testing.assert_allclose(scores.astype(mx.float32), exact, atol=2.0**-9 * 40)


def test_encoding_is_blockwise_and_cuts_exactly() -> None:
    x = rows((1, 2, 160, 80))
    for codec in both(3, 80, 10):
        whole, part = codec.encode(x), codec.encode(x[:, :, 40:120])
        cut = codec.cut(whole, 40, 120)
        assert all(mx.array_equal(cut[name], part[name]) for name in codec.layout)
        tiles = codec.tiles(whole, 64)
        assert len(tiles) > 1 and sum(codec.n_tokens(tile) for tile in tiles) == 160
        assert mx.array_equal(mx.concatenate([codec.decode(tile) for tile in tiles], axis=2), codec.decode(whole))


@pytest.mark.parametrize("bits", BITS)
def test_encoding_decoded_rows_changes_nothing(bits: int) -> None:
    """So rows that a trim brings back cost nothing the second time (float32; float16 rounds them once)."""
    x = rows((1, 2, 64, 64))
    for codec in both(bits, 64):
        codes = codec.encode(x)
        again = codec.encode(codec.decode(codes))
        assert all(mx.array_equal(again[name], codes[name]) for name in codes)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("part, bits", [(0, 4), (1, 3), (2, 2)])
def test_storage(part: int, bits: int, dim: int) -> None:
    """(8 + 31 bits) / 32 + 16 / D bits per element; at 3 bits rows of 80 numbers fill whole words as 96."""
    held = cache(part, 3, dim)
    x = rows((1, 8, 4096, dim), dtype=mx.float16)
    held.update_and_fetch(x, x)
    held.settle()
    wide = math.ceil(dim * bits / math.lcm(32, bits)) * math.lcm(32, bits) / dim
    assert 8 * held.held_bytes()["packed"] / (2 * x.size) == pytest.approx((8 + 31 * wide) / 32 + 16 / dim, rel=1e-12)
    assert held.held_bytes()["window"] == 0
    if dim == 128:  # 4.25, 3.28125 and 2.3125: 3.28 in the mean of the three groups of layers
        assert held.held_bytes()["packed"] == {4: 4_456_448, 3: 3_440_640, 2: 2_424_832}[bits]


def test_tokens_without_anchors() -> None:
    """Every token alone: b + 16 / D bits, and nothing waits."""
    held = cache(cachegen_use_delta=False)
    feed(held, tensors(192, (1, 2, 128, 128)), [191, 1])
    assert held.held_bytes()["packed"] == 2 * 2 * 192 * (128 * 4 // 8 + 2) and held.held_bytes()["window"] == 0


@pytest.mark.parametrize("bits, groups, n", [(4, 3, 30), (4, 3, 32), (8, 5, 7), (3, 3, 12), (4, 1, 9), (4, 8, 2)])
def test_bits_never_rise_with_depth(bits: int, groups: int, n: int) -> None:
    config = KVCacheConfig(method="cachegen", cachegen_bits=bits, cachegen_layer_groups=groups)
    by_layer = [resolved_bits(config, LayerInfo(rank=i, n_layers=n)) for i in range(n)]
    assert by_layer[0] == bits and by_layer == sorted(by_layer, reverse=True) and min(by_layer) >= 2
    used = min(groups, n)
    assert len(set(by_layer)) == min(used, bits - 1)
    sizes = [by_layer.count(b) for b in set(by_layer) if b > 2]
    assert not sizes or max(sizes) - min(sizes) <= 1 or used < groups
    override = dataclasses.replace(config, cachegen_resolved_bits=5)
    assert {resolved_bits(override, LayerInfo(rank=i, n_layers=n)) for i in range(n)} == {5}


def test_schedule_counts_the_attention_layers_of_a_model() -> None:
    """Sliding layers keep their own cache and take no part."""
    model = tiny.build("gemma3_text")
    caches = [
        c
        for c in KVCacheBuilder.for_model(model, KVCacheConfig(method="cachegen", cachegen_layer_groups=2))
        if isinstance(c, CompressedKVCache)
    ]
    notes = [c.describe()["notes"][0] for c in caches]
    assert [int(note[0]) for note in notes] == [4 - 2 * i // len(caches) for i in range(len(caches))]


@pytest.mark.parametrize("bits", [0, 1, 9, True, 2.0])
def test_bad_settings_are_refused(bits: int) -> None:
    for build in (lambda: TokenSymmetric(bits, dim=64), lambda: Anchored(bits, 8, dim=64)):
        with pytest.raises(QuantizerConfigError, match="bits="):
            build()


def test_group_size_without_differences_is_refused() -> None:
    config = KVCacheConfig(method="cachegen", cachegen_use_delta=False, cachegen_group_size=16)
    with pytest.raises(QuantizerConfigError, match="cachegen_group_size=16"):
        KVCacheBuilder.for_model(tiny.build("llama"), config)
