"""KIVI: which rows are packed, what stays exact, orientations, storage to the byte, outlier channels of keys."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import identical, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import GROW
from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.core.types import LayerInfo

R = 128


def make(dim: int = 64, **fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(method="kivi", **fields), LayerInfo(head_dim=dim, value_dim=dim))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300, 4096])
def test_what_is_packed_and_what_stays_exact(tokens: int) -> None:
    data = tensors(tokens)
    cache = make()
    cache.append(data.k, data.v)
    cache.settle()
    keys, values = cache.store.keys, cache.store.values
    assert (keys.n_sealed, keys.tail.n) == (tokens // R * R, tokens % R)  # none exact where R divides the count
    packed = max(0, tokens - R) // 8 * 8  # up to 7 more than R wait
    assert (values.n_sealed, values.tail.n) == (packed, tokens - packed)
    k, v = cache.materialize()
    assert identical(k[:, :, tokens // R * R :], data.k[:, :, tokens // R * R :])
    assert identical(v[:, :, packed:], data.v[:, :, packed:])


def test_keys_want_channel_groups() -> None:
    """Six channels 12 times as large around 15, the others standard normal, 2 bits, groups of 32.

    The specification's figures for data of this kind, 0.125 and 0.266, leave open where means and channels are; these
    are for channels at equal distances. 1024 tokens of 128 channels: the errors scatter by about 1 %.
    """
    x = np.random.default_rng(0).normal(size=(1, 2, 1024, 128)).astype(np.float32)
    x[..., ::21][..., :6] *= 12
    x[..., ::21][..., :6] += 15

    def relative(codec: Codec) -> float:
        error = np.array(codec.decode(codec.encode(mx.array(x)))) - x
        return float((error**2).sum() / (x**2).sum())

    assert relative(ChannelAffine(2, 32)) == pytest.approx(0.066, rel=0.03)
    assert relative(TokenAffine(2, 32, dim=128)) == pytest.approx(0.213, rel=0.03)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_storage(dim: int) -> None:
    """Bits per number at 4096 tokens of float16: the table's 3.000 and 3.406 (to the byte) at head size 128.

    The other sizes cost the same but for values of 80, which are padded to 96; values have room for 64 more rows.
    """
    tokens, heads = 4096, 8
    cache = make(dim)
    rows = mx.random.normal((1, heads, tokens, dim), key=mx.random.key(0)).astype(mx.float16)
    cache.append(rows, rows)
    cache.settle()
    held = [sum(a.nbytes for a in s.arrays().values()) for s in (cache.store.keys, cache.store.values)]
    packed = tokens - R
    assert packed % GROW == 0  # no spare room at this length
    padded = -(-dim // 32) * 32
    assert held[0] == heads * tokens * dim * (2 + 1) // 8
    assert held[1] == heads * (packed * padded * (2 + 1) // 8 + R * dim * 2)
    assert held[1] / (heads * tokens * dim) * 8 == pytest.approx(3.406 if padded == dim else 3.9875, abs=5e-4)


# ----------------------------------------------------------------------------------------------------- outlier channels


def planted(tokens: int, channels: list[list[int]], scale: float = 20.0) -> mx.array:
    """Keys ``(1, H, T, 64)`` with ``channels`` of every head so many times as large."""
    x = np.random.default_rng(3).normal(size=(1, len(channels), tokens, 64)).astype(np.float32)
    for head, large in enumerate(channels):
        x[:, head, :, large] *= scale
    return mx.array(x)


def fed(keys: mx.array, **fields: Any) -> CompressedKVCache:
    cache = make(**fields)
    for start in range(0, keys.shape[2], 100):
        part = keys[:, :, start : start + 100]
        cache.update_and_fetch(part, mx.ones(part.shape))
        cache.attend(part, scale=0.1, mask="causal")
    return cache


@pytest.mark.parametrize("switch", [{"bit_width_outlier": 4}, {"enable_outlier_two_stream": True}])
def test_planted_channels_are_found(switch: dict[str, Any]) -> None:
    channels = [[3, 17, 60], [0, 1, 63]]
    cache = fed(planted(300, channels), n_outlier_channels=3, **switch)
    held = cache.store.keys.arrays()
    assert held["fitted.channels"].tolist() == [channels]
    assert "3 outlier channels of every key head" in cache.describe()["notes"][0]
    bits = switch.get("bit_width_outlier", 2)  # left alone, both streams have the same
    assert held["out_words"].nbytes == 2 * 256 * 3 * bits // 8 and held["in_words"].nbytes == 2 * 256 * 61 * 2 // 8


def test_scores_are_better_than_those_of_one_stream() -> None:
    """At equal average bits: a quarter of the channels at 6 bits and the rest at 2, or all at 3."""
    keys = planted(256, [list(range(0, 64, 4))] * 2)
    q = mx.random.normal((1, 2, 16, 64), key=mx.random.key(1))
    want = q @ keys.swapaxes(-1, -2)

    def error(cache: CompressedKVCache) -> float:
        return float(mx.square(cache.store.keys.scores(q) - want).mean())

    split, one = fed(keys, bit_width_outlier=6), fed(keys, bit_width_inlier=3)
    assert split.store.keys.n_sealed == one.store.keys.n_sealed == 256
    held = [sum(a.nbytes for a in c.store.keys.arrays().values()) for c in (split, one)]
    assert held[0] - held[1] == 2 * 16 * 2  # where the channels are
    assert error(split) < 0.1 * error(one)


def test_keys_wait_until_the_channels_are_known() -> None:
    keys = planted(300, [[5], [6]])
    cache = fed(keys[:, :, :200], bit_width_outlier=4, n_outlier_channels=1, n_calib_tokens=250)
    assert cache.store.keys.n_sealed == 0 and cache.store.values.n_sealed == 72
    cache = fed(keys, bit_width_outlier=4, n_outlier_channels=1, n_calib_tokens=250)
    assert cache.store.keys.n_sealed == 256


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"n_outlier_channels": 4}, "n_outlier_channels=4.*bit_width_outlier"),
        ({"n_calib_tokens": 64}, "n_calib_tokens=64.*bit_width_outlier"),
        ({"bit_width_outlier": 4, "n_outlier_channels": 128}, "n_outlier_channels=128.*head_dim"),
        ({"bit_width_outlier": 7}, "bit_width_outlier=7.*one of"),
        (
            {"bit_width_outlier": 3, "kivi_group_size": 16, "residual_length": 16},
            "residual_length=16.*2- and 3-bit codes fill whole words.*Use 0 or 32",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        KVCacheFactory.create(KVCacheConfig(method="kivi", **fields))
