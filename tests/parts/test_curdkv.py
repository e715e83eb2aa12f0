"""CurDKV: leverage scores against the golden sets of the specification and against numpy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.matrix import feed, split, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.methods import curdkv
from veloxquant_mlx.policies import heads, leverage, norms, select
from veloxquant_mlx.policies.leverage import Leverage


def best(score: mx.array, budget: int = 12, sinks: int = 4) -> list[list[int]]:
    """The selection with nothing protected but sinks."""
    rows = mx.arange(score.shape[-1])[None, None]
    kept, _ = select.top(select.protect(score, rows, sinks, 0, score.shape[-1]), rows, budget)
    return np.array(kept[0]).tolist()


def windowed(x: np.ndarray, window: int) -> np.ndarray:
    """Squared norms ``(H, n)`` over their sums in windows, in float64."""
    a = (x**2).sum(-1)
    out = np.zeros_like(a)
    for start in range(0, a.shape[1], window):
        part = a[:, start : start + window]
        out[:, start : start + window] = part / part.sum(-1, keepdims=True)
    return out


KEYS, VALUES = fixture.DATA.k, fixture.DATA.v
GOLDEN = {
    "product": (
        lambda: Leverage().of(KEYS) * Leverage().of(VALUES),
        [[0, 1, 2, 3, 9, 23, 28, 31, 32, 43, 46, 47], [0, 1, 2, 3, 4, 6, 18, 24, 26, 31, 33, 36]],
    ),
    "keys only": (
        lambda: Leverage().of(KEYS),
        [[0, 1, 2, 3, 9, 22, 23, 27, 29, 32, 43, 46], [0, 1, 2, 3, 4, 13, 19, 24, 26, 35, 36, 38]],
    ),
    "values only": (
        lambda: Leverage().of(VALUES),
        [[0, 1, 2, 3, 18, 23, 25, 28, 31, 33, 46, 47], [0, 1, 2, 3, 6, 8, 9, 15, 23, 31, 33, 46]],
    ),
    "no windows": (
        lambda: Leverage(window=0).of(KEYS) * Leverage(window=0).of(VALUES),
        [[0, 1, 2, 3, 9, 18, 23, 28, 31, 32, 46, 47], [0, 1, 2, 3, 4, 6, 18, 24, 26, 31, 33, 36]],
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_sets_without_protection_of_the_newest(case: str) -> None:
    score, sets = GOLDEN[case]
    assert best(score()) == sets


@pytest.mark.parametrize("chunks", [[48], [47, 1], split(48, 7)], ids=str)
def test_real_cache_keeps_sinks_and_the_newest(chunks: list[int]) -> None:
    cache = fixture.new_cache("curdkv", curdkv_budget=12)
    fixture.fill(cache, chunks)
    score = windowed(fixture.K, 16) * windowed(fixture.V, 16)
    assert fixture.kept(cache) == fixture.top(score, 12, protected=[0, 1, 2, 3, 47])


@pytest.mark.parametrize("n", [1, 15, 16, 17, 45])
def test_windows_start_at_the_first_row(n: int) -> None:
    got = leverage.by_norm(KEYS[:, :, :n], 16)[0]
    # float32 sums of 8 squares and of 16 such sums
    assert np.allclose(np.array(got), windowed(fixture.K[:, :n], 16), rtol=1e-5)


def test_a_constant_factor_of_keys_or_values_changes_nothing() -> None:
    factors = mx.array([3.0, 0.01])[:, None, None]
    assert best(Leverage().of(KEYS * factors) * Leverage().of(VALUES / factors)) == GOLDEN["product"][1]


def test_of_two_equal_keys_the_larger_value_wins() -> None:
    data = tensors(40, (1, 1, 8, 8))
    rows = mx.arange(40)[:, None]
    keys = mx.where((rows == 17) | (rows == 20), data.k[:, :, 17:18], data.k)
    for larger in (17, 20):
        values = mx.where((rows == 17) | (rows == 20), data.v[:, :, 5:6], data.v)
        values = mx.where(rows == larger, values * 1.01, values)
        score = np.array(Leverage(window=16).of(keys) * Leverage(window=16).of(values))[0, 0]
        assert score[larger] == score[[17, 20]].max() > score[[17, 20]].min()


def test_zero_rows_score_zero() -> None:
    """Also in a window of nothing but zeros."""
    keys = mx.where(mx.arange(48)[:, None] < 20, 0.0, KEYS)
    score = np.array(leverage.by_norm(keys, 16))
    assert np.isfinite(score).all() and not score[..., :20].any() and (score[..., 20:] > 0).all()
    assert np.allclose(score[..., 16:32].sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 3, 8, 100])
def test_svd_leverage(rank: int) -> None:
    """Squared rows of the left singular vectors, summed over the ``rank`` strongest: they add up to the rank."""
    u, _, _ = np.linalg.svd(fixture.K, full_matrices=False)
    got = np.array(leverage.by_svd(KEYS, rank))[0]
    # float32 eigenvectors: about 1e-7 over the relative gap of neighbouring eigenvalues, here some per cent
    assert np.allclose(got, (u[..., :rank] ** 2).sum(-1), atol=1e-4)
    assert np.allclose(got.sum(-1), min(rank, 8), atol=1e-4)


def test_svd_leverage_of_rank_deficient_rows() -> None:
    flat = mx.where(mx.arange(8) < 3, KEYS, 0.0)
    score = leverage.by_svd(flat, 8)
    assert mx.allclose(score.sum(axis=-1), mx.full((1, 2), 3.0), atol=1e-4) and bool(mx.isfinite(score).all())


def test_sketch_keeps_norms_in_the_mean_and_depends_on_the_seed_only() -> None:
    tables = [leverage.sketch(64, 20, seed) for seed in range(200)]
    # Squared norms of a sketch of 20 columns have a relative deviation of sqrt(2 / 20); their mean over 200 of 0.022.
    row = mx.random.normal((64,), key=mx.random.key(0))
    means = mx.stack([mx.square(row @ table).sum() for table in tables]).mean() / mx.square(row).sum()
    assert abs(means.item() - 1) < 0.1
    assert mx.array_equal(tables[7], leverage.sketch(64, 20, 7)) and not mx.array_equal(tables[7], tables[8])
    assert leverage.sketch(8, 100, 0).shape == (8, 8)


@pytest.mark.parametrize("method", ["curdkv", "nestedkv", "qfilters"])
def test_scratch_is_bounded_without_a_change(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head at a time (qfilters: a few rows at a time) gives the scores of all together."""
    fields = {f"{method}_budget": 60} | ({"qfilters_on_low_retention": "ignore"} if method == "qfilters" else {})
    sets = []
    for scratch in (heads.SCRATCH, 1):
        monkeypatch.setattr(heads, "SCRATCH", scratch)
        monkeypatch.setattr(norms, "SCRATCH", max(scratch, 4 * 7 * 4 * 64))  # seven rows of four heads
        cache = CompressedKVCache(KVCacheConfig(method=method, head_dim=64, **fields))  # type: ignore[arg-type]
        feed(cache, tensors(200, (1, 4, 64, 64)), [199, 1])
        sets.append(fixture.kept(cache))
    assert sets[0] == sets[1]


@pytest.mark.parametrize("how", ["norm", "sketch", "svd"])
def test_rank_cap_counts_where_a_rank_is_used(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curdkv, "LEVERAGE", how)
    sets = []
    for rank in (1, 8):
        cache = fixture.new_cache("curdkv", curdkv_budget=12, curdkv_rank_cap=rank)
        fixture.fill(cache)
        sets.append(fixture.kept(cache))
        assert all(len(head) == 12 and head[:4] == [0, 1, 2, 3] and head[-1] == 47 for head in sets[-1])
    assert (sets[0] == sets[1]) == (how == "norm")


def test_decoding_adds_and_the_next_turn_chooses_again() -> None:
    data = tensors(330)
    cache = fixture.new_cache("curdkv", curdkv_budget=32)
    feed(cache, data.part(0, 200), [199, 1])
    feed(cache, data.part(200, 220), [1] * 20)
    assert cache.positions.shape[-1] == 52
    before = np.array(cache.positions[0])
    feed(cache, data.part(220, 330), [109, 1])
    # The window grid lies over the rows held, not over positions.
    rows = np.concatenate([before, np.broadcast_to(np.arange(220, 330), (2, 110))], axis=1)
    held = [np.stack([np.array(x[0, h])[p] for h, p in enumerate(rows)]).astype(np.float64) for x in (data.k, data.v)]
    score = windowed(held[0], 16) * windowed(held[1], 16)
    slots = fixture.top(score, 32, protected=[0, 1, 2, 3, rows.shape[1] - 1])
    assert fixture.kept(cache) == [sorted(rows[h][s].tolist()) for h, s in enumerate(slots)]


def test_leverage_and_norm_want_opposite_keys() -> None:
    """High norms stay here, low norms in knorm: not a bug."""
    data = tensors(48, (1, 1, 8, 8))
    keys = mx.where(mx.arange(48)[:, None] == 21, data.k * 4, data.k)
    assert 21 in best(Leverage().of(keys) * Leverage().of(data.v), 8, 0)[0]
