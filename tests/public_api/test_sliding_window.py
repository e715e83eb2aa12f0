"""SlidingWindowKVCache equals a fresh cache that saw only the last tokens; the KVCache base class."""

# Wrong types are the subject here.
# pyright: reportArgumentType=false

import math

import mlx.core as mx
import pytest

from veloxquant_mlx import KVCache, QuantizerConfigError
from veloxquant_mlx.cache import SlidingWindowKVCache
from veloxquant_mlx.core import CacheStateError

D = 8


class Exact(KVCache):
    """Plain attention over every row; ``noise`` grows per token, so that a different history gives other numbers."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.keys, self.values = [], []

    def append_key(self, k):
        self.keys.append(k * (1 + 0.01 * len(self.keys)))

    def append_value(self, v):
        self.values.append(v)

    def attend(self, q):
        p = mx.softmax(mx.stack(self.keys) @ q / math.sqrt(D))
        return p @ mx.stack(self.values)

    def memory_bytes(self):
        return sum(row.nbytes for row in (*self.keys, *self.values))

    def __len__(self):
        return len(self.values)


class Bare(KVCache):
    """Only what is abstract."""

    def append_key(self, k): ...

    def append_value(self, v): ...

    def attend(self, q):
        return q

    def memory_bytes(self):
        return 0


def rows(n: int, seed: int) -> mx.array:
    return mx.random.normal((n, D), key=mx.random.key(seed))


@pytest.mark.parametrize("window", [1, 3, 5, 20])
@pytest.mark.parametrize("read_every", [1, 4, 12])
def test_equals_a_fresh_cache_of_the_window(window, read_every):
    keys, values, q = rows(12, 0), rows(12, 1), rows(1, 2)[0]
    cache = SlidingWindowKVCache(Exact(), window)
    for n in range(1, 13):
        cache.append(keys[n - 1], values[n - 1])
        assert len(cache) == min(n, window)
        if n % read_every == 0:
            fresh = Exact()
            for i in range(max(0, n - window), n):
                fresh.append(keys[i], values[i])
            assert mx.array_equal(cache.attend(q), fresh.attend(q))  # the same operations on the same rows
            assert cache.memory_bytes() == fresh.memory_bytes() == min(n, window) * 2 * D * 4
            assert cache.window_bytes == min(n, window) * 2 * D * 4


def test_keys_and_values_may_come_in_turn():
    keys, values, q = rows(6, 0), rows(6, 1), rows(1, 2)[0]
    both, apart = SlidingWindowKVCache(Exact(), 3), SlidingWindowKVCache(Exact(), 3)
    for k, v in zip(keys, values, strict=True):
        both.append(k, v)
    for k in keys:
        apart.append_key(k)
    with pytest.raises(CacheStateError, match="6 keys but 0 values"):
        apart.attend(q)
    for v in values:
        apart.append_value(v)
    assert mx.array_equal(both.attend(q), apart.attend(q))


def test_rows_are_kept_as_they_were():
    k = mx.ones((D,))
    cache = SlidingWindowKVCache(Exact(), 1)
    cache.append(mx.zeros((D,)), mx.zeros((D,)))
    cache.append(k, k)
    k[0] = 100.0  # changes the caller's array in place
    assert cache.attend(mx.ones((D,))).tolist() == [1.0] * D


def test_reset_and_repr():
    cache = SlidingWindowKVCache(Exact(), 2)
    for row in rows(5, 0):
        cache.append(row, row)
    assert repr(cache) == "SlidingWindowKVCache(size=2)"
    cache.reset()
    assert (len(cache), cache.memory_bytes(), cache.window_bytes) == (0, 0, 0)
    row = rows(1, 1)[0]
    cache.append(row, row)
    assert mx.array_equal(cache.attend(row), row)  # the softmax of one score is 1


def test_windows_nest():
    cache = SlidingWindowKVCache(SlidingWindowKVCache(Exact(), 5), 2)
    keys = rows(9, 0)
    for row in keys:
        cache.append(row, row)
    fresh = Exact()
    for row in keys[-2:]:
        fresh.append(row, row)
    assert mx.array_equal(cache.attend(keys[0]), fresh.attend(keys[0]))


@pytest.mark.parametrize("window", [0, -1, 2.0, True, None])
def test_window_size_is_checked(window):
    with pytest.raises(QuantizerConfigError, match=r"window_size=.*>= 1"):
        SlidingWindowKVCache(Exact(), window)


def test_inner_must_be_able_to_forget():
    with pytest.raises(QuantizerConfigError, match=r"inner=Bare.*reset"):
        SlidingWindowKVCache(Bare(), 4)


def test_base_class():
    with pytest.raises(TypeError, match="abstract"):
        KVCache()  # type: ignore[abstract]
    with pytest.raises(NotImplementedError, match="Bare.*reset"):
        Bare().reset()
    with pytest.raises(NotImplementedError, match="Bare.*__len__"):
        len(Bare())
    assert repr(Exact()) == "Exact(size=0)"
