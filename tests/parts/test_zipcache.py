"""zipcache: who is salient, exact tiers per head, error bounds, products on packed tiers, bytes, segments."""

from __future__ import annotations

from math import ceil
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from tests.formulas_zipcache import zipcache
from tests.matrix import Row, Tensors, feed, identical, same_state, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.codecs.tiers import TieredKeys, TieredValues, segment_length
from veloxquant_mlx.policies.saliency import ProbeSaliency

ROW = Row("zipcache", "zipcache", zipcache(4, 2, 0.2))
SETTINGS = [((4, 2), 0.2, 32), ((3, 3), 0.37, 24), ((8, 5), 0.6, 128), ((4, 1), 1.0, 1000), ((6, 2), 0.0, 32)]


def normal(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def saliency(data: Tensors, sinks: mx.array | None = None) -> mx.array:
    """What the guide says at the end of this prompt, fed in two chunks and its last token."""
    cache, at, n, own = ROW.cache(), 0, data.k.shape[2], ProbeSaliency._saliency
    said: list[mx.array] = []

    def spy(guide: ProbeSaliency, *args: Any) -> mx.array:
        said.append(own(guide, *args))
        return said[-1]

    with patch.object(ProbeSaliency, "_saliency", spy):
        for length in (n // 2, n - n // 2 - 1, 1):
            now = data.part(at, at + length)
            cache.update_and_fetch(now.k, now.v)
            cache.attend(now.q, scale=0.125, mask="causal" if length > 1 else None, sinks=sinks)
            at += length
    return said[0]


def held(codes: dict[str, mx.array]) -> int:
    return sum(a.nbytes for a in codes.values())


def drawn(n: int, seed: int = 42) -> list[int]:
    return ProbeSaliency(seed=seed)._drawn(0, n).tolist()


def test_saliency_by_its_definition() -> None:
    n = 200
    data = tensors(n, (2, 2, 64, 64))
    probes = sorted({*drawn(n), *range(n - 10, n)})
    q, k = np.array(data.q).reshape(2, 2, 2, n, 64)[:, :, :, probes], np.array(data.k)[:, :, None]
    z = np.where(np.array(probes)[:, None] >= np.arange(n), q @ k.swapaxes(-1, -2) * 0.125, -np.inf)
    a = np.exp(z - z.max(-1, keepdims=True))
    a = (a / a.sum(-1, keepdims=True)).sum(axis=(2, 3))
    count = np.maximum((np.array(probes)[:, None] >= np.arange(n)).sum(0), 1)
    # float32 sums of 200 terms in another order
    assert np.allclose(np.array(saliency(data)), a / count, rtol=1e-4, atol=1e-7)


def test_drawn_probes_are_a_twentieth_and_follow_the_seed() -> None:
    # 200000 draws of 0.05: three standard deviations are 292
    assert abs(sum(len(drawn(20000, seed)) for seed in range(10)) - 10000) < 292
    assert drawn(20000)[: len(drawn(300))] == drawn(300) != drawn(300, seed=7)


def test_equal_attention_gives_flat_saliency() -> None:
    """A large learned sink leaves every row the same weight, however many rows a probe sees."""
    n = 300
    data = tensors(n)
    flat = saliency(Tensors(data.q, data.k * 0, data.v), sinks=mx.full((4,), 12.0))
    # the sink outweighs 300 rows of e^0 by a factor of 540
    assert flat.max() < 1.003 * flat.min()
    seen = np.array([sum(p >= i for p in {*drawn(n), *range(n - 15, n)}) for i in range(n)])
    assert seen[0] > 1.5 * seen[-16]  # without the division token 0 would lead


def test_planted_token_is_in_the_high_tier() -> None:
    data, place = tensors(300), 37
    q = data.q + 1.0
    k = mx.where((mx.arange(300) == place)[:, None], 4.0, data.k)
    cache = ROW.cache()
    feed(cache, Tensors(q, k, data.v), [299, 1])
    for stream in (cache._store.keys, cache._store.values):
        assert stream.prompt is not None
        bits = unpack(stream.prompt.codes["tiers"], 1)
        assert mx.all(bits[..., place] == 1)


@pytest.mark.parametrize("n", [1, 5, 100, 333])
@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.3, 0.6, 1.0])
def test_exactly_so_many_tokens_per_head_and_ties_by_position(n: int, fraction: float) -> None:
    high = ceil(round(fraction * n, 6))
    for guide in (mx.random.uniform(shape=(2, 3, n), key=mx.random.key(1)), mx.zeros((2, 3, n))):
        for codec in (TieredKeys((4, 2), fraction, 32), TieredValues((4, 2), fraction, dim=64)):
            bits = np.array(unpack(codec.encode_guided(normal((2, 3, n, 64)), guide)["tiers"], 1))
            assert (bits.sum(-1) == high).all()
    assert bits[..., :high].all()


@pytest.mark.parametrize("segment", [0, 96, 160])
@pytest.mark.parametrize(("bits", "fraction", "group"), SETTINGS)
def test_errors_are_within_half_a_step_of_the_tier(
    bits: tuple[int, int], fraction: float, group: int, segment: int
) -> None:
    n = 2 * segment or 150
    x, guide = normal((2, 2, n, 40)) * 3, mx.random.uniform(shape=(2, 2, n), key=mx.random.key(1))
    keys, values = TieredKeys(bits, fraction, group, segment), TieredValues(bits, fraction, segment, dim=40)
    for codec in (keys, values):
        codes = codec.encode_guided(x, guide)
        inside = np.array(unpack(codes["tiers"], 1)).reshape(2, 2, -1, (segment + 31) // 32 * 32 or 160)
        inside = inside[..., : segment or n].reshape(2, 2, n)[..., None]
        error = np.abs(np.array(codec.rows(codes, 0, n) - x))
        scale = np.array(codes["channels"], np.float32) if codec is values else np.ones((2, 2, 1, 40))
        scale = np.repeat(scale, n // scale.shape[2], axis=2)
        y = np.array(x) / scale
        for on, b, name in ((1, bits[0], "high"), (0, bits[1], "low")):
            if b > 1 and f"{name}_words" in codes:
                step = np.array(codes[f"{name}_scales"], np.float32).max()
                # half the largest step, and both parameters rounded to float16
                bound = scale * (step / 2 + 2.0**-11 * (np.abs(y).max() + (2**b - 1) * step))
                assert (error <= bound)[np.broadcast_to(inside == on, error.shape)].all()


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_one_tier_is_uniform_quantisation(fraction: float) -> None:
    x, bits = normal((1, 2, 64, 64)), 4 if fraction else 2
    codec, plain = TieredKeys((4, 2), fraction, 32), ChannelAffine(bits, 32)
    codes = codec.encode(x)
    assert identical(codec.rows(codes, 0, 64), plain.decode(plain.encode(x)))


def test_channel_scales_protect_the_other_channels() -> None:
    """64 channels, 4 bits, one of them 100 times larger: figures of the specification, over 2048 tokens."""
    x = normal((1, 1, 2048, 64))
    loud = x * mx.where(mx.arange(64) == 5, 100.0, 1.0)
    separable, plain = TieredValues((4, 4), 1.0, dim=64), TokenAffine(4, 64, dim=64)

    def mse(y: mx.array, codec: TieredValues | TokenAffine) -> float:
        error = (codec.rows(codec.encode(y), 0, 2048) - y)[..., 6:]
        return float((error**2).mean())

    assert mse(loud, separable) / mse(x, separable) == pytest.approx(6.3, rel=0.15)
    assert mse(loud, plain) / mse(x, plain) == pytest.approx(390, rel=0.15)


@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize(("bits", "fraction", "group"), SETTINGS)
def test_products_equal_the_decoded_rows(
    bits: tuple[int, int], fraction: float, group: int, segment: int, dim: int
) -> None:
    n = 2 * segment or 75
    x, guide = normal((2, 2, n, dim)), mx.random.uniform(shape=(2, 2, n), key=mx.random.key(1))
    keys, values = TieredKeys(bits, fraction, group, segment), TieredValues(bits, fraction, segment, dim=dim)
    q, p = normal((2, 2, 3, dim), 2) * 0.1, mx.softmax(normal((2, 2, 3, n), 3), axis=-1)
    codes = keys.encode_guided(x, guide)
    rows = keys.rows(codes, 0, n)
    # float32 sums in another order
    assert mx.allclose(keys.scores(q, codes)[..., :n], q @ rows.swapaxes(-1, -2), rtol=1e-5, atol=1e-5)
    for start, stop in ((0, 40), (33, n), (n - 1, n)):
        assert identical(keys.rows(codes, start, stop), rows[:, :, start:stop])
    codes = values.encode_guided(x, guide)
    rows = values.rows(codes, 0, n)
    assert mx.allclose(values.mix(p, codes), p @ rows, rtol=1e-5, atol=1e-5)
    for start, stop in ((0, 40), (33, n), (n - 1, n)):
        assert identical(values.rows(codes, start, stop), rows[:, :, start:stop])


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_bytes_of_the_storage_table(dim: int) -> None:
    """16: 3.41 bits for keys of 128 channels, 0.03 more for whole groups. Values have parameters per head: 2.66."""
    shape, n = (1, 1, dim, dim), 4096
    x = normal((1, 1, n, dim)).astype(mx.float16)
    sizes = [held(codec.encode(x)) for codec in (TieredKeys((4, 2), 0.2, 32), TieredValues((4, 2), 0.2, dim=dim))]
    assert sum(sizes) == ROW.held(n, shape, 2)
    keys, values = (8 * size / n / dim for size in sizes)
    assert keys == pytest.approx(2.4 + 32 / 32 + 1 / dim, rel=0.01)
    row = (dim + 31) // 32 * 32
    assert values == pytest.approx((2.4 * row + 32) / dim + 16 / n + 1 / dim, rel=0.001)
    if dim == 128:
        assert keys == pytest.approx(3.41, abs=0.03) and values == pytest.approx(2.66, abs=0.005)


def test_paper_setting_of_one_group_per_tier() -> None:
    """2.42 bits for keys; 60 % at 4 bits make 16 / 3.2 = 5.0 times less (the paper: 4.98)."""
    for fraction, bits in ((0.2, 2.423), (0.6, 3.223)):
        codes = TieredKeys((4, 2), fraction, 1 << 20).encode(normal((1, 1, 4096, 128)))
        assert 8 * held(codes) / 4096 / 128 == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize(("fraction", "expected"), [(0.2, 160), (0.5, 128), (0.6, 160), (0.0, 96), (1.0, 96)])
def test_segments_fill_groups(fraction: float, expected: int) -> None:
    assert segment_length(fraction, (4, 2), 32) == expected


def test_decoded_tokens_are_sealed_by_segments() -> None:
    data, cache = tensors(500), ROW.cache()
    feed(cache, data.part(0, 100), [99, 1])
    sealed = []
    for i in range(100, 430):
        feed(cache, data.part(i, i + 1), [1])
        sealed.append(cache._store.keys.n_sealed)
    assert sealed == [100] * 159 + [260] * 160 + [420] * 11
    assert cache._store.values.n_sealed == 420
    packed = cache._store.keys.packed
    assert packed is not None
    bits = np.array(unpack(packed.view()["tiers"], 1)).reshape(2, 2, 160)
    assert (bits.sum(-1) == 32).all()


def test_a_later_prompt_is_sealed_at_its_end() -> None:
    """Whole segments of it; the rest keeps its probes. However it was fed, the same is held."""
    data = tensors(700)
    states = []
    for chunks in ([199, 1, 400, 1], [100, 99, 1, 50, 350, 1]):
        cache = ROW.cache()
        feed(cache, data.part(0, sum(chunks)), chunks)
        states.append(cache)
    assert states[0]._store.keys.n_sealed == 200 + 2 * 160 and same_state(*states)
    assert states[0]._store.row_aux["guide.watched"].shape[-1] == 81


def test_trim_forgets_probes() -> None:
    """Queries of tokens that a trim took away have no say in what comes after."""
    data, other = tensors(300), tensors(100, seed=9)
    cache, fresh = ROW.cache(), ROW.cache()
    feed(cache, data, [300])
    cache.trim(100)
    feed(cache, other, [99, 1])
    feed(fresh, data.part(0, 200), [200])
    feed(fresh, other, [99, 1])
    assert same_state(cache, fresh)


def test_probes_fit_in_the_promised_room() -> None:
    cache = ROW.cache()
    feed(cache, tensors(1000), [500, 500])
    # a twentieth of the queries as the newest ones and about as many drawn ones
    assert held(cache._store.aux) < 0.13 * 1000 * 4 * 64 * 4


def test_options_have_effects() -> None:
    data = tensors(300)
    base, group = ROW.cache(), ROW.cache(zipcache_group_size=64)
    floats, wide = ROW.cache(zipcache_quantize_values=False), ROW.cache(zipcache_hi_bits=8, zipcache_lo_bits=6)
    for cache in (base, group, floats, wide):
        feed(cache, data, [299, 1])
    assert group.nbytes < base.nbytes < wide.nbytes < floats.nbytes
    assert identical(floats.materialize()[1], data.v) and not identical(base.materialize()[1], data.v)
    with pytest.raises(QuantizerConfigError, match="zipcache_lo_bits=4"):
        KVCacheFactory.create(KVCacheConfig(method="zipcache", zipcache_hi_bits=2, zipcache_lo_bits=4))


def test_needs_the_models_queries() -> None:
    cache = ROW.cache()
    assert cache.needs_queries
    with pytest.raises(QuantizerConfigError, match="needs the model's queries"):
        cache.use_arrays()


@pytest.mark.parametrize("value", [0.0, 6e4, 1e-6])
def test_extreme_values_stay_finite(value: float) -> None:
    x = mx.full((1, 2, 40, 64), value, dtype=mx.float16)
    for codec in (TieredKeys((4, 2), 0.2, 32), TieredValues((4, 2), 0.2, dim=64)):
        rows = codec.rows(codec.encode(x), 0, 40, mx.float16)
        # float16 parameters: relative 2^-11 of a channel's root and of a row's smallest value
        assert mx.allclose(rows, x, rtol=2.0**-9, atol=1e-7)
