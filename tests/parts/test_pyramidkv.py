"""PyramidKV: the budgets of its specification, exact sums, and SnapKV inside a layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixture import GROUP, HEADS, fill, kept, new_cache
from tests.matrix import feed, same_state, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods import pyramidkv
from veloxquant_mlx.policies.budgets import Pyramid, pyramid, rounded

PRESS = [936, 908, 880, 852, 823, 795, 767, 739, 711, 683, 655, 627, 598, 570, 542, 514, 486, 458, 430, 402, 373, 345]
PRESS += [317, 289, 261, 233, 205, 177, 148, 120, 92, 64]
# mean, beta, window, layers, length -> budgets
GOLDEN = {
    "kvpress": ((500, 20, 64, 32, 1000), PRESS),
    "kvpress falls back": ((1024, 20, 64, 32, 4096), [1024] * 32),
    "long": ((512, 2, 32, 8, 4096), [768, 695, 622, 549, 475, 402, 329, 256]),
    "clipped": ((512, 2, 32, 8, 600), [568, 552, 536, 520, 504, 488, 472, 456]),
    "short": ((512, 2, 32, 8, 500), [512] * 8),
    "flat": ((512, 1, 32, 8, 4096), [512] * 8),
    "one layer": ((512, 2, 32, 1, 4096), [512]),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_budgets(case: str) -> None:
    (mean, beta, window, layers, length), want = GOLDEN[case]
    assert list(pyramid(layers, mean, beta, window, window + 1 if case != "kvpress" else 0, length)) == want


@pytest.mark.parametrize("mean", [64, 100, 513])
@pytest.mark.parametrize("beta", [1, 1.3, 2, 7.7])
@pytest.mark.parametrize("layers", [1, 2, 3, 28, 61])
@pytest.mark.parametrize("least", [33, 41, 60])
def test_sums_are_exact(mean: int, beta: float, layers: int, least: int) -> None:
    for length in (mean + 1, mean + 40, 2 * mean + 7, 100 * mean):
        budgets = pyramid(layers, mean, beta, 32, least, length)
        assert sum(budgets) == layers * mean and min(budgets) >= least
        assert list(budgets) == sorted(budgets, reverse=True)


def test_remainders() -> None:
    assert rounded([1.5, 1.2, 1.3], 4) == [2, 1, 1]
    assert rounded([0.5, 0.5, 2.0], 3) == [1, 0, 2]  # ties: the earlier layer


def of_rank(rank: int, layers: int, **fields: Any) -> CompressedKVCache:
    info = LayerInfo(head_dim=8, value_dim=8, kv_heads=HEADS, query_heads=HEADS * GROUP, rank=rank, n_layers=layers)
    return new_cache("pyramidkv", info, **fields)


def test_layers_keep_their_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixture, mean 16, window 8, beta 2: 24, 16 and 8 tokens, the last raised to window + 1; no matter the chunks."""
    monkeypatch.setattr(pyramidkv, "OBS_WINDOW", 8)
    for rank, budget in enumerate((23, 16, 9)):
        for chunks in ([48], [47, 1], [7] * 6 + [5, 1]):
            cache = of_rank(rank, 3, pyramid_budget=16, pyramid_n_sink=0)
            fill(cache, chunks)
            assert [len(head) for head in kept(cache)] == [budget] * HEADS


def test_snapkv_golden_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyramidkv, "OBS_WINDOW", 8)
    window = list(range(40, 48))
    for backend in ("auto", "reference"):
        cache = new_cache("pyramidkv", pyramid_budget=16, pyramid_n_sink=0, pyramid_backend=backend)
        fill(cache)
        assert kept(cache) == [[7, 8, 9, 10, 11, 21, 22, 23, *window], [11, 12, 13, 14, 15, 18, 20, 24, *window]]


def test_flat_is_snapkv() -> None:
    """beta = 1 is snapkv with the same window, kernel and budget, bit for bit."""
    data, info = tensors(400), LayerInfo(head_dim=64, value_dim=64, rank=5, n_layers=6)
    flat = CompressedKVCache(KVCacheConfig(method="pyramidkv", pyramid_budget=90, pyramid_beta=1.0), info)
    snap = CompressedKVCache(KVCacheConfig(method="snapkv", snap_budget=90), info)
    for cache in (flat, snap):
        feed(cache, data, [350, 49, 1])
    assert same_state(flat, snap) and flat.positions.shape[-1] == 90


def test_resolved_budget_and_capacity() -> None:
    info, data = LayerInfo(head_dim=64, value_dim=64, rank=0, n_layers=6), tensors(400)
    for fields, rows in (
        ({}, 135),
        ({"pyramid_resolved_budget": 70}, 70),
        ({"capacity": 100}, 100),  # no layer exceeds a hard cap
    ):
        cache = new_cache("pyramidkv", info, pyramid_budget=90, **fields)
        feed(cache, data, [399, 1])
        assert cache.positions.shape[-1] == rows


def test_later_turns_keep_the_sum() -> None:
    """The pyramid of a later turn is that of all tokens seen: a layer with few rows does not fill up to the mean."""
    caches = [
        CompressedKVCache(
            KVCacheConfig(method="pyramidkv", pyramid_budget=60),
            LayerInfo(head_dim=64, value_dim=64, rank=rank, n_layers=4),
        )
        for rank in range(4)
    ]
    data = tensors(400)
    for cache in caches:
        feed(cache, data.part(0, 300), [299, 1])
        assert cache.positions.shape[-1] == Pyramid(cache.layer.rank, 4, 60, 2.0, 32, 37)(300)
        feed(cache, data.part(300, 400), [99, 1])
    assert sum(cache.positions.shape[-1] for cache in caches) == 4 * 60
