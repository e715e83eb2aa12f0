"""KVzip's parts: scores and selections against numpy and the golden sets, the probe "latest", refusals."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.matrix import feed, split, tensors
from veloxquant_mlx import CacheStateError, KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.policies import reconstruction, select
from veloxquant_mlx.policies.reconstruction import best, peaks, ragged

# Largest attention of each pair over its group's heads and all queries, (2, 48).
PEAK = fixture.A.reshape(2, 2, 48, 48).max(axis=(1, 2))
LATEST: dict[str, Any] = {"kvzip_probe": "latest", "kvzip_budget": 40, "kvzip_n_sink": 2}


def sets(chosen: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(head).tolist() for head in chosen]


def guarded(score: np.ndarray, sinks: int) -> np.ndarray:
    score = score.astype(np.float32)
    score[:, :sinks] = np.inf
    return score


# ------------------------------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize(
    ("budget", "want"),
    [
        (6, [[0, 1, 2, 5, 8, 9, 11], [0, 1, 3, 4, 5]]),
        (8, [[0, 1, 2, 4, 5, 8, 9, 11, 22], [0, 1, 3, 4, 5, 13, 19]]),
    ],
)
def test_golden_sets(budget: int, want: list[list[int]]) -> None:
    assert sets(best([guarded(PEAK, 2)], 2 * budget)[0]) == want
    # Two layers of one head each compete as two heads of one layer do.
    layers = best([guarded(PEAK[:1], 2), guarded(PEAK[1:], 2)], 2 * budget)
    assert [sets(layer)[0] for layer in layers] == want


def test_golden_sets_of_equal_heads() -> None:
    """The uniform variant, which other methods' selection gives."""
    index, _ = select.top(mx.array(guarded(PEAK, 2))[None], mx.arange(48)[None, None], 12)
    want = [[0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 22], [0, 1, 3, 4, 5, 11, 13, 14, 18, 19, 22, 26]]
    assert index[0].tolist() == want


def test_ties_go_to_lower_layers_heads_and_older_rows() -> None:
    zeros = [np.zeros((2, 3), np.float32), np.zeros((1, 3), np.float32)]
    assert [sets(layer) for layer in best(zeros, 5)] == [[[0, 1, 2], [0, 1]], [[]]]
    assert [sets(layer) for layer in best(zeros, 9)] == [[[0, 1, 2]] * 2, [[0, 1, 2]]]
    assert not any(layer.any() for layer in best(zeros, 0))


def test_ragged_rows() -> None:
    index, valid = ragged(np.array([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]], bool))
    assert index.tolist() == [[[1, 2, 4], [0, 0, 0]]] and valid is not None
    assert valid.tolist() == [[[True] * 3, [True, False, False]]]
    assert ragged(np.eye(3, dtype=bool))[1] is None
    index, valid = ragged(np.zeros((2, 4), bool))  # heads may keep nothing; a layer has one row all the same
    assert index.shape == (1, 2, 1) and valid is not None and not valid.any()


# --------------------------------------------------------------------------------------------------------------- scores


def oracle(q: np.ndarray, k: np.ndarray, start: int, stop: int, sinks: np.ndarray | None = None) -> np.ndarray:
    """Peaks ``(H, stop - start)`` in float64, query by query."""
    (hq, rows, d), (h, n, _) = q.shape, k.shape
    out = np.zeros((h, stop - start))
    for head in range(hq):
        for i in range(rows):
            z = k[head // (hq // h), : n - rows + i + 1] @ q[head, i] / np.sqrt(d)
            if sinks is not None:
                z = np.append(z, sinks[head])
            p = fixture.softmax(z)[start:stop]
            out[head // (hq // h)] = np.maximum(out[head // (hq // h)], p)
    return out


@pytest.mark.parametrize("tile", [256, 5, 1])
@pytest.mark.parametrize("learned", [None, [0.5, 3.0, -2.0, 1.0]])
def test_peaks(tile: int, learned: list[float] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 queries over 48 keys, the last 20 their own; tiles change nothing."""
    monkeypatch.setattr(reconstruction, "ROWS", tile)
    sinks = None if learned is None else mx.array(learned)
    got = peaks(fixture.DATA.q[:, :, :20], fixture.DATA.k, 3, 28, fixture.SCALE, sinks)
    want = oracle(fixture.Q[:, :20], fixture.K, 3, 28, None if learned is None else np.array(learned))
    assert got.dtype == mx.float32 and got.shape == (1, 2, 25) and bool(((got > 0) & (got <= 1)).all())
    assert np.allclose(np.array(got[0]), want, atol=1e-6)  # float32 softmax of logits below 10


def test_peaks_of_all_queries_are_those_of_the_golden_sets() -> None:
    got = peaks(fixture.DATA.q, fixture.DATA.k, 0, 48, fixture.SCALE)
    assert np.allclose(np.array(got[0]), PEAK, atol=1e-6)


def test_half_precision_is_scored_in_float32() -> None:
    data = tensors(60, dtype=mx.float16)
    a = peaks(data.q[:, :, :9], data.k, 0, 51, 0.125)
    b = peaks(data.q[:, :, :9].astype(mx.float32), data.k.astype(mx.float32), 0, 51, 0.125)
    assert mx.array_equal(a, b)


# ------------------------------------------------------------------------------------------------------- probe "latest"


@pytest.mark.parametrize("chunks", [[48], split(48, 7), [47, 1]], ids=str)
def test_latest(chunks: list[int]) -> None:
    """The last 32 queries score what is older, their own rows stay, heads compete for 2 x 40 pairs."""
    cache = fixture.new_cache("kvzip", **LATEST)
    fixture.fill(cache, chunks)
    seen = guarded(fixture.A[:, 16:].reshape(2, 2, 32, 48).max(axis=(1, 2)), 2)
    seen[:, 16:] = np.inf
    kept = fixture.kept(cache)
    assert kept == sets(best([seen], 80)[0]) and len(kept[0]) != len(kept[1])
    assert "not by reconstruction" in cache.describe()["notes"][0]


@pytest.mark.parametrize("budget", [40, 100])
def test_only_the_first_prompt_drops(budget: int) -> None:
    """Also where it fitted into the budget: then a caller can still ask for it."""
    cache = CompressedKVCache(KVCacheConfig(method="kvzip", head_dim=64, kvzip_probe="latest", kvzip_budget=budget))
    data = tensors(200)
    feed(cache, data.part(0, 60), [59, 1])
    counts = [len(head) for head in fixture.kept(cache)]
    assert sum(counts) == 2 * min(budget, 60) or len(counts) == 1
    feed(cache, data.part(60, 200), [3, 50, 1, 80, *[1] * 6])
    assert [len(head) for head in fixture.kept(cache)] == [n + 140 for n in counts]
    assert bool(cache.store.aux) == (budget == 100) and not cache.store.row_aux
    cache.end_prefill()
    assert sum(len(head) for head in fixture.kept(cache)) == (200 if budget == 100 else sum(counts) + 280)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "kvzip_probe='context'.*'latest'.*for_model"),
        ({"kvzip_budget": 4}, "kvzip_budget=4"),
        ({"kvzip_probe": "latest", "kvzip_budget": 36}, "kvzip_budget=36.*> 36"),
        ({"capacity": 600}, "capacity=600"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizerConfigError, match=message):
        KVCacheFactory.create(KVCacheConfig(method="kvzip", **fields))


def test_a_cache_that_no_model_feeds_says_so_where_it_must_choose() -> None:
    for chunks, ends in (([60, 1], False), ([60], True)):
        cache = CompressedKVCache(KVCacheConfig(method="kvzip", head_dim=64, kvzip_budget=50))
        with pytest.raises(CacheStateError, match="no reconstruction pass was run.*prepare_kvzip"):
            feed(cache, tensors(sum(chunks)), chunks)
            assert ends
            cache.end_prefill()
    fits = CompressedKVCache(KVCacheConfig(method="kvzip", head_dim=64, kvzip_budget=70))
    feed(fits, tensors(100), [60, 1, *[1] * 39])
    assert fits.store.n == 100
