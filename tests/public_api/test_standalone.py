"""The standalone methods as the library's own cache: the documented product, and the same numbers as serving caches."""

# Wrong types are the subject here.
# pyright: reportArgumentType=false

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache as ServingCache

from tests.models import tiny
from veloxquant_mlx import KVCache, KVCacheBuilder, KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache import SlidingWindowKVCache
from veloxquant_mlx.cache.base import STANDALONE_METHODS
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core import CacheInputError, CacheStateError
from veloxquant_mlx.observers import EventLog

D = 64
NAMES = sorted(STANDALONE_METHODS)


# Heads of a layer share their bits: with one leading axis there is nothing to share.
ALIKE: dict[str, dict[str, Any]] = {"spectral": {"spectral_key_d_eff": 1, "spectral_val_d_eff": 1}}
# Fitted before tokens are counted.
EARLY: dict[str, dict[str, Any]] = {"spectral": {"n_calib_tokens": 64}}


def rows(n: int, seed: int = 0, dim: int = D) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32))


def create(name: str = "turboquant_mse", dim: int = D, **fields: Any) -> Any:
    return KVCacheFactory.create(KVCacheConfig(method=name, head_dim=dim, **fields))


def fed(cache: Any, keys: mx.array, values: mx.array) -> Any:
    for k, v in zip(keys, values, strict=True):
        cache.append(k, v)
    return cache


@pytest.mark.parametrize("name", NAMES)
def test_create_gives_the_librarys_own_cache(name):
    cache = create(name)
    assert isinstance(cache, KVCache) and not isinstance(cache, ServingCache)
    assert (len(cache), repr(cache)) == (0, "StandaloneKVCache(size=0)")
    fed(cache, rows(5), rows(5, 1))
    out = cache.attend(rows(1, 2)[0])
    assert out.shape == (D,) and len(cache) == 5 and mx.isfinite(out).all()


def test_the_documented_builder_example():
    cache = (
        KVCacheBuilder()
        .with_method("turboquant_prod")
        .with_head_dim(128)
        .with_bit_width(inlier=2, outlier=3)
        .with_jl_dim(128)
        .with_seed(42)
        .build()
    )
    keys, values = rows(200, 0, 128), rows(200, 1, 128)
    fed(cache, keys, values)
    q = rows(1, 2, 128)[0]
    p = mx.softmax(keys @ q / 128**0.5)
    # 2.5 bits per key number and 2 per value number; random keys get near equal weights
    assert isinstance(cache, KVCache)
    assert mx.square(cache.attend(q) - p @ values).sum() < 0.5 * mx.square(p @ values).sum()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fields", [{}, {"enable_vectorized_attend": False}, {"dtype": mx.float16}])
def test_numbers_are_those_of_a_model_served(name, fields):
    """Token by token, bit for bit what a layer of a model gets that has one head."""
    fields = fields | ALIKE.get(name, {})
    config = KVCacheConfig(method=name, seed=3, **fields)
    served = KVCacheBuilder.for_model(tiny.build("llama"), config, serve_standalone=True)[1]
    dim = served.config.head_dim
    assert served.config.seed == 4 and isinstance(served, CompressedKVCache)
    cache = create(name, dim, seed=4, **fields)
    for k, v, q in zip(rows(150, 0, dim), rows(150, 1, dim), rows(150, 2, dim), strict=True):
        cache.append(k, v)
        served.update_and_fetch(k[None, None, None], v[None, None, None])
        assert mx.array_equal(cache.attend(q), served.attend(q[None, None, None], scale=dim**-0.5)[0, 0, 0])


@pytest.mark.parametrize("name", NAMES)
def test_reading_changes_nothing(name):
    keys, values, q = rows(40), rows(40, 1), rows(1, 2)[0]
    often, once = create(name), create(name)
    for i in range(40):
        often.append(keys[i], values[i])
        held = often.memory_bytes()
        assert mx.array_equal(often.attend(q), often.attend(q))
        assert often.memory_bytes() == held
    fed(once, keys, values)
    assert once.memory_bytes() == often.memory_bytes()
    assert mx.array_equal(once.attend(q), often.attend(q))


def test_keys_and_values_may_come_in_turn():
    keys, values, q = rows(6), rows(6, 1), rows(1, 2)[0]
    both, apart = fed(create(), keys, values), create()
    for k in keys:
        apart.append_key(k)
    assert len(apart) == 0 and apart.memory_bytes() - create().memory_bytes() == 6 * D * 4
    with pytest.raises(CacheStateError, match="6 keys but 0 values"):
        apart.attend(q)
    for v in values[:4]:
        apart.append_value(v)
    with pytest.raises(CacheStateError, match="6 keys but 4 values"):
        apart.attend(q)
    for v in values[4:]:
        apart.append_value(v)
    assert mx.array_equal(both.attend(q), apart.attend(q))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 7])
def test_sliding_window(name, window):
    """Numbers and bytes of a fresh cache that saw only the last tokens, whenever it is read."""
    keys, values, q = rows(20), rows(20, 1), rows(1, 2)[0]
    cache = create(name, sliding_window=window)
    assert isinstance(cache, SlidingWindowKVCache)
    for n in range(1, 21):
        cache.append(keys[n - 1], values[n - 1])
        first = max(0, n - window)
        fresh = fed(create(name), keys[first:n], values[first:n])
        assert len(cache) == n - first
        if n % 3 == 0:
            assert mx.array_equal(cache.attend(q), fresh.attend(q))
        if n % 4 == 0:
            assert cache.memory_bytes() == fresh.memory_bytes()


def test_capacity():
    cache = create(capacity=5)
    fed(cache, rows(5), rows(5, 1))
    expected = cache.attend(rows(1, 2)[0])
    with pytest.raises(CacheStateError, match="capacity=5"):
        cache.append(rows(1)[0], rows(1)[0])
    assert len(cache) == 5 and mx.array_equal(cache.attend(rows(1, 2)[0]), expected)
    fed(create(capacity=5, sliding_window=5), rows(9), rows(9, 1)).attend(rows(1, 2)[0])


def test_reset_keeps_what_was_fitted():
    strong = mx.where(mx.arange(D) < 16, 9.0, 1.0)
    config = {"bit_width_outlier": 4, "n_calib_tokens": 32}
    cache = fed(create(**config), rows(40) * strong, rows(40, 1))
    cache.append_key(rows(1)[0])  # half a token is forgotten too
    cache.reset()
    assert len(cache) == 0
    with pytest.raises(CacheStateError, match="empty"):
        cache.attend(rows(1)[0])
    other = rows(40, 3) * strong[::-1]
    fed(cache, other, rows(40, 1))
    fresh = fed(create(**config), other, rows(40, 1))
    assert cache.memory_bytes() == fresh.memory_bytes()
    assert not mx.array_equal(cache.attend(rows(1)[0]), fresh.attend(rows(1)[0]))
    plain = fed(create(), rows(40), rows(40, 1))
    plain.reset()
    assert plain.memory_bytes() == create().memory_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_memory_grows_by_the_codes(name):
    """16-bit rows would take 256 bytes per token. What is fitted on the first tokens is fitted by then."""
    cache, sizes = create(name, **EARLY.get(name, {})), []
    for i in range(8):
        fed(cache, rows(64, 2 * i), rows(64, 2 * i + 1))
        sizes.append(cache.memory_bytes())
    assert max(np.diff(sizes[-3:])) <= 64 * 160


@pytest.mark.parametrize("x", [mx.zeros((D + 1,)), mx.zeros((1, D)), mx.zeros((D,), mx.int32), mx.array(1.0)])
def test_only_vectors_of_the_head_are_taken(x):
    cache = create()
    for verb in (cache.append_key, cache.append_value, cache.attend):
        with pytest.raises(CacheInputError, match=r"\(64,\) of a float dtype"):
            verb(x)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_output_has_the_dtype_of_the_query(dtype):
    cache = fed(create(), rows(9).astype(dtype), rows(9, 1).astype(dtype))
    assert cache.attend(rows(1, 2)[0].astype(dtype)).dtype == dtype


def test_what_the_caller_changes_later_is_not_seen():
    config = KVCacheConfig(method="turboquant_mse", head_dim=D)
    cache: Any = KVCacheFactory.create(config)
    config.head_dim = 32
    k = mx.ones((D,))
    cache.append(k, k)
    k[0] = 100.0
    assert cache.attend(mx.ones((D,))).tolist() == [1.0] * D
    assert cache.config.head_dim == D


def test_a_copy_is_independent():
    cache = fed(create(), rows(9), rows(9, 1))
    expected, twin = cache.attend(rows(1)[0]), copy.deepcopy(cache)
    fed(twin, rows(3, 5), rows(3, 6))
    assert (len(cache), len(twin)) == (9, 12)
    assert mx.array_equal(cache.attend(rows(1)[0]), expected)


def test_observers_are_told():
    log = EventLog()
    fed(create(observers=[log]), rows(17), rows(17, 1))
    assert log.counts() == {"encode": 2}  # eight rows each; the newest token waits


@pytest.mark.parametrize("name", sorted(STANDALONE_METHODS))
def test_models_have_no_such_window(name):
    with pytest.raises(QuantizerConfigError, match="sliding_window=8.*must be None"):
        KVCacheBuilder.for_model(object(), KVCacheConfig(method=name, sliding_window=8), serve_standalone=True)
