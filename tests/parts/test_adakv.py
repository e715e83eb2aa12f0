"""adakv: how bits are shared, bounds with every head's own bits, products over shared planes, bytes, independence."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.formulas_adakv import adakv
from tests.matrix import Row, Tensors, feed, identical, same_state, split, stored_bytes, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.calibrate.allocate import allocate_bits, expected
from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.headwise import HeadKeys, HeadValues, shared_planes, spread
from veloxquant_mlx.codecs.packing import unpack
from veloxquant_mlx.policies.importance import BETA, entropy, share_bits

ROW = Row("adakv", "adakv", adakv(64), {"residual_length": 64})
ENTROPY: dict[str, Any] = {"adakv_importance": "attention_entropy", "adakv_obs_window": 16}
CHOICES = [(2, 3, 4), (2, 4, 6), (1, 3, 4), (2, 4, 8), (3, 5, 8), (4, 6), (3,)]


def importance(heads: int, blocks: int = 1, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).lognormal(sigma=1.5, size=(1, heads, blocks)).astype(np.float32))


def shared(weights: mx.array, choices: tuple[int, ...], budget: int) -> list[int]:
    return np.array(share_bits(weights, choices, budget))[0, :, 0].tolist()


def held_bits(cache: CompressedKVCache) -> np.ndarray:
    """Bits ``(B, H, blocks)`` of the keys held; values must have the same."""
    keys, values = (stream.packed for stream in (cache._store.keys, cache._store.values))
    assert keys is not None and values is not None
    bits, same = (np.array(p.view()["bits"]) if p.n else np.zeros((1, 1, 0)) for p in (keys, values))
    assert (bits[..., : same.shape[-1]] == same).all()
    return bits


@pytest.mark.parametrize("heads", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("target", [2.0, 2.5, 2.7, 3.3, 4.0])
def test_sum_is_the_budget_and_no_allocation_is_better(heads: int, target: float) -> None:
    budget = int(heads * target + 1e-9)
    for seed in range(5):
        weights = importance(heads, seed=seed)
        bits, w = shared(weights, (2, 3, 4), budget), np.array(weights)[0, :, 0].tolist()
        assert sum(bits) == budget
        best = allocate_bits(w, budget / heads, distortion=BETA, choices=(2, 3, 4))
        # float32 gains against float64 costs
        assert expected(w, bits, BETA) == pytest.approx(expected(w, best, BETA), rel=1e-5)


@pytest.mark.parametrize("choices", CHOICES)
def test_sum_stays_within_the_budget_for_uneven_choices(choices: tuple[int, ...]) -> None:
    """The sum misses the budget by less than the smallest step that some head could still take."""
    for heads, seed in itertools.product((1, 3, 8), range(6)):
        for budget in range(heads * choices[0], heads * choices[-1] + 1):
            bits = shared(importance(heads, seed=seed), choices, budget)
            assert set(bits) <= set(choices) and sum(bits) <= budget
            steps = [b - a for a, b in itertools.pairwise(choices) if a in bits]
            assert not steps or budget - sum(bits) < min(steps)


def test_heads_change_places_with_their_importance() -> None:
    weights, order = importance(8) ** 2, np.random.default_rng(1).permutation(8)
    assert np.array(shared(weights, (2, 3, 4), 20))[order].tolist() == shared(
        weights[:, mx.array(order)], (2, 3, 4), 20
    )
    w, bits = np.array(weights)[0, :, 0], np.array(shared(weights, (2, 3, 4), 20))
    assert (np.diff(bits[np.argsort(w)]) >= 0).all() and set(bits) == {2, 3, 4}


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_heads_get_equal_bits_but_for_the_remainder(value: float) -> None:
    assert shared(mx.full((1, 8, 1), value), (2, 3, 4), 20) == [3] * 4 + [2] * 4
    assert shared(mx.full((1, 8, 1), value), (2, 3, 4), 24) == [3] * 8


def test_sequences_and_blocks_have_their_own() -> None:
    weights = mx.concatenate([importance(4, 3, seed) for seed in (3, 4)])
    bits = np.array(share_bits(weights, (2, 3, 4), 11))
    for b, k in itertools.product(range(2), range(3)):
        assert bits[b, :, k].tolist() == shared(weights[b : b + 1, :, k : k + 1], (2, 3, 4), 11)
    assert len({tuple(bits[b, :, k].tolist()) for b in range(2) for k in range(3)}) > 1


def test_entropy_runs_from_one_entry_to_all() -> None:
    assert entropy(mx.ones((3, 64)) * 0.2).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert entropy((mx.arange(64) == 5).astype(mx.float32)).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("group", [32, 24])
@pytest.mark.parametrize("choices", CHOICES)
def test_a_head_is_coded_as_by_the_plain_codec_of_its_bits(choices: tuple[int, ...], group: int) -> None:
    """Half a step is therefore the bound of every head with its own bits (tests/parts/test_affine.py)."""
    heads, block, dim = 5, 96, 80
    planes = shared_planes(choices, sum(choices) / len(choices), heads)
    bits = share_bits(importance(heads, 2), choices, int(heads * sum(choices) / len(choices)))
    x = mx.random.normal((1, heads, 2 * block, dim), key=mx.random.key(0))
    keys, values = HeadKeys(choices, planes, group, block), HeadValues(choices, planes, group, block, dim=dim)
    for codec in (keys, values):
        rows = codec.decode(codec.encode_guided(x, bits))
        for head, at in itertools.product(range(heads), range(2)):
            part = (slice(None), slice(head, head + 1), slice(at * block, at * block + block))
            b = int(np.array(bits)[0, head, at])
            plain = ChannelAffine(b, group) if codec is keys else TokenAffine(b, group, dim=dim)
            assert mx.allclose(rows[part], plain.decode(plain.encode(x[part])), rtol=1e-6, atol=1e-6)


def test_single_bits_are_spread_over_codes_of_two() -> None:
    words = mx.random.randint(0, 1 << 32, (3, 5), dtype=mx.uint32, key=mx.random.key(0))
    assert mx.array_equal(unpack(spread(words), 2), unpack(words, 1))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("choices", CHOICES)
def test_products_equal_the_decoded_rows(choices: tuple[int, ...], dim: int) -> None:
    heads, n, target = 5, 12 * 96, sum(choices) / len(choices)  # more than one tile
    planes = shared_planes(choices, target, heads)
    bits = mx.concatenate([share_bits(importance(heads, 12, seed), choices, int(heads * target)) for seed in (0, 1)])
    x = mx.random.normal((2, heads, n, dim), key=mx.random.key(0))
    q = mx.random.normal((2, heads, 3, dim), key=mx.random.key(1)) * 0.1
    p = mx.softmax(mx.random.normal((2, heads, 3, n), key=mx.random.key(2)), axis=-1)
    keys, values = HeadKeys(choices, planes, 32, 96), HeadValues(choices, planes, 32, 96, dim=dim)
    codes = keys.encode_guided(x, bits)
    # float32 sums in another order
    assert mx.allclose(keys.scores(q, codes), q @ keys.decode(codes).swapaxes(-1, -2), rtol=1e-5, atol=1e-5)
    codes = values.encode_guided(x, bits)
    assert mx.allclose(values.mix(p, codes), p @ values.decode(codes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_bytes_of_the_storage_table(dim: int) -> None:
    """16: 3.500 bits for keys and 3.891 for values, and 8 bits per head and block."""
    shape, n, row = (1, 8, dim, dim), 4096, (dim + 31) // 32 * 32
    cache, data = ROW.cache(shape, residual_length=128), tensors(n, shape, dtype=mx.float16)
    cache.append(data.k, data.v)
    cache.settle()
    assert stored_bytes(cache) == adakv(128)(n, shape, 2)
    blocks = {"k": n // 128, "v": n // 128 - 1}
    keys, values = (
        8 * (sum(a.nbytes for name, a in cache._store.arrays().items() if name[0] == s) - 8 * blocks[s]) / 8 / n / dim
        for s in "kv"
    )
    assert keys == 3.5 and values == (31 * 3.5 * row / dim + 16) / 32
    if dim == 128:
        assert round(values, 3) == 3.891
    assert (held_bits(cache).sum(1) == 20).all()


def test_wide_keys_get_more_bits() -> None:
    """The variance of norms: head 1 is twice head 0 in size, head 2 varies from token to token."""
    data = tensors(128, (1, 3, 64, 64))
    size = mx.where(mx.arange(128) % 2 == 0, 0.5, 3.0)[:, None]
    k = mx.concatenate([data.k[:, :1], data.k[:, 1:2] * 2, data.k[:, 2:] * size], axis=1)
    cache = ROW.cache((1, 3, 64, 64), adakv_target_avg_bits=3.0)
    feed(cache, Tensors(data.q, k, data.v), [128])
    assert held_bits(cache)[0].T.tolist() == [[2, 3, 4]] * 2


def test_flat_attention_gets_more_bits() -> None:
    """Head 0 looks everywhere alike, head 1 at one token of each block."""
    data = tensors(128)
    q = mx.ones_like(data.q)
    k = mx.concatenate([data.k[:, :1] * 0, mx.where(mx.arange(128)[:, None] % 64 == 9, 1.0, data.k[:, 1:] * 0)], axis=1)
    cache = ROW.cache(**ENTROPY)
    feed(cache, Tensors(q, k, data.v), [128])
    assert held_bits(cache)[0].T.tolist() == [[3, 2]] * 2
    found = cache.needs_queries, ROW.cache().needs_queries
    assert found == (True, False)


@pytest.mark.parametrize("fields", [{}, ENTROPY])
def test_bits_do_not_depend_on_chunks(fields: dict[str, Any]) -> None:
    shape = (2, 5, 64, 64)
    data, caches = tensors(300, shape), []
    for chunks in ([300], split(300, 7), [1] * 300, [64, 1, 130, 105]):
        caches.append(ROW.cache(shape, **fields))
        feed(caches[-1], data, chunks)
    assert all(same_state(cache, caches[0]) for cache in caches)
    bits = held_bits(caches[0])
    assert (bits.sum(1) == 12).all() and len({tuple(b) for b in bits.swapaxes(1, 2).reshape(-1, 5).tolist()}) > 2


def test_queries_that_a_trim_took_away_have_no_say() -> None:
    data, other = tensors(300), tensors(100, seed=9)
    cache, fresh = ROW.cache(**ENTROPY), ROW.cache(**ENTROPY)
    feed(cache, data, [300])
    cache.trim(40)
    feed(cache, other, [100])
    feed(fresh, data.part(0, 260), [260])
    feed(fresh, other, [50, 50])
    # queries of tokens 240 to 259 are the same to both, though the first cache held those of 284 to 299 only
    assert held_bits(cache)[..., :4].tolist() == held_bits(fresh)[..., :4].tolist()
    assert cache.offset == fresh.offset and stored_bytes(cache) == stored_bytes(fresh)


def test_options_have_effects() -> None:
    data = tensors(640)

    def bits(**fields: Any) -> np.ndarray:
        feed(cache := ROW.cache(**fields), data, [640])
        return held_bits(cache)[0]

    base, slow, wide = bits(), bits(adakv_update_interval=130), bits(adakv_hi_bit=8, adakv_target_avg_bits=5.0)
    # Blocks 3, 5, 7 and 9 are the first to begin at or after 130, 260, 390 and 520 tokens.
    assert slow.T.tolist() == [base.T.tolist()[i] for i in (0, 0, 0, 3, 3, 5, 5, 7, 7, 9)]
    assert wide.sum(0).max() > base.sum(0).max() == 5
    assert not np.array_equal(bits(**ENTROPY), base)
    assert not np.array_equal(bits(**ENTROPY), bits(**ENTROPY | {"adakv_obs_window": 1}))
    assert set(bits(adakv_lo_bit=1, adakv_mid_bit=2).reshape(-1).tolist()) <= {1, 2, 4}
    sizes = []
    for group in (32, 64):
        feed(cache := ROW.cache(adakv_group_size=group), data, [640])
        sizes.append(cache.nbytes)
    assert sizes[1] < sizes[0]


def test_one_head_has_no_choice_and_the_receipt_says_so() -> None:
    feed(cache := ROW.cache((1, 1, 64, 64)), tensors(128, (1, 1, 64, 64)), [128])
    assert (held_bits(cache) == 2).all()
    assert cache.describe()["notes"] == ["adakv_target_avg_bits=2.5: all 1 heads have the same bits"]
    feed(both := ROW.cache(), tensors(128), [128])
    assert both.describe()["notes"] == []


def test_attention_of_the_models_own() -> None:
    """Keys alone decide about norms; entropy needs the queries and says so."""
    data, caches = tensors(200), (ROW.cache(), ROW.cache())
    for start in range(0, 200, 50):
        now = data.part(start, start + 50)
        caches[0].update_and_fetch(now.k, now.v)
    caches[0].settle()
    feed(caches[1], data, [200])
    assert identical(*(mx.array(held_bits(cache)) for cache in caches))
    with pytest.raises(QuantizerConfigError, match="needs the model's queries"):
        ROW.cache(**ENTROPY).use_arrays()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adakv_mid_bit": 5}, "adakv_mid_bit=5"),
        ({"adakv_target_avg_bits": 4.5}, "adakv_target_avg_bits=4.5"),
        ({"residual_length": 48}, "residual_length=48"),
        ({"adakv_importance": "attention_entropy", "adakv_obs_window": 200}, "adakv_obs_window=200"),
        ({"adakv_importance": "key_norm"}, "adakv_importance='key_norm'"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        KVCacheFactory.create(KVCacheConfig(method="adakv", **fields))
