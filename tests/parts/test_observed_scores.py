"""Scores from observed attention as parts: by chunk and tile, with sinks and holes, on packed rows."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.fixture import DATA, SCALE
from tests.matrix import Tensors, feed, split, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.core.types import Recipe, Stream
from veloxquant_mlx.policies import observed
from veloxquant_mlx.policies.gumbel import NoisyAttention, stream
from veloxquant_mlx.policies.observed import LastQuery, RecentCorrelation, SummedAttention
from veloxquant_mlx.policies.scores import Score, Step

CHUNKS = {"whole": [48], "sevens": split(48, 7), "as mlx_lm": [47, 1]}


def watched(
    score: Score, data: Tensors = DATA, chunks: list[int] | None = None, sinks: mx.array | None = None
) -> Store:
    """A store that holds everything, and what ``score`` remembers of it."""
    store, at = Store(Recipe(Stream(), Stream())), 0
    for n in chunks or [data.k.shape[2]]:
        now = data.part(at, at + n)
        store.append(now.k, now.v, at)
        at += n
        score.observe(store, Step(now.q, SCALE, sinks, at, True))
    return store


def scores(score: Score, sinks: mx.array | None = None, **more: Any) -> np.ndarray:
    """``(H | 1, n)`` after everything was seen."""
    return np.array(score.score(watched(score, sinks=sinks, **more), SCALE, sinks)[0])


SUMS = {
    "attention": (SummedAttention(), fixture.group_mean(fixture.A.sum(axis=1))),
    "decay": (
        SummedAttention(0.9),
        fixture.group_mean((fixture.A * 0.9 ** np.arange(47, -1, -1)[:, None]).sum(axis=1)),
    ),
    "noise": (
        NoisyAttention(words=stream(5, 2), tau_init=0.7),
        None,
    ),
}


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("scratch", [1, 4 * 4 * 48 * 10, 64 << 20])
def test_sums_by_chunk_and_by_tile(case: str, chunks: list[int], scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 float32 weights of size 1 at most are added in another order: 48 * 2^-24 each way, with a margin of 3."""
    score, want = SUMS[case]
    want = scores(score) if want is None else want
    monkeypatch.setattr(observed, "SCRATCH", scratch)
    got = scores(score, chunks=chunks)
    assert np.allclose(got, want, rtol=0, atol=1e-5)
    if score.decay == 1:  # every query hands out weights that sum to 1
        assert np.allclose(got.sum(axis=-1), 48, atol=1e-4)


def test_tiles_hold_as_many_queries_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 query heads and 48 rows of float32: 768 bytes a query."""
    seen: list[int] = []
    monkeypatch.setattr(observed, "SCRATCH", 10 * 768 + 767)
    original = SummedAttention.weights
    monkeypatch.setattr(
        SummedAttention,
        "weights",
        lambda self, store, z, *rest: seen.append(z.shape[3]) or original(self, store, z, *rest),
    )
    watched(SummedAttention())
    assert seen == [10, 10, 10, 10, 8]


def test_sums_by_reader_count() -> None:
    """A press that divides by the number of queries that saw a row, and protects nothing, keeps these."""
    score = scores(SummedAttention()) / (48 - np.arange(48))
    assert fixture.top(score, 12) == [
        [0, 1, 2, 3, 5, 6, 7, 8, 9, 16, 20, 22],
        [0, 1, 3, 4, 5, 11, 13, 14, 18, 19, 22, 43],
    ]


def test_last_query_without_a_protected_newest_row() -> None:
    assert fixture.top(scores(LastQuery()), 12) == [[0, 3, 5, 11, 15, 17, 21, 22, 26, 31, 41, 43]]


def test_recent_correlation_fused_by_the_largest() -> None:
    assert fixture.top(scores(RecentCorrelation(8, "max")), 16, range(40, 48)) == [
        [1, 3, 8, 9, 20, 23, 32, 38, *range(40, 48)],
        [3, 11, 12, 13, 18, 22, 26, 31, *range(40, 48)],
    ]


def test_recent_correlation_of_one_query_is_the_last_query_per_head() -> None:
    """Over the older rows alone: the same order as with all rows."""
    score = scores(RecentCorrelation(1))
    want = fixture.group_mean(fixture.softmax(fixture.Z[:, 47, :47]))
    assert np.allclose(score[:, :47], want, atol=1e-6) and not score[:, 47].any()


def test_recent_correlation_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    for fusion in ("sum", "max"):
        want = scores(RecentCorrelation(8, fusion))
        with monkeypatch.context() as patch:
            patch.setattr(observed, "SCRATCH", 3 * 768)
            assert np.allclose(scores(RecentCorrelation(8, fusion)), want, atol=1e-6)


ALL = {
    "summed": SummedAttention(0.98),
    "noisy": NoisyAttention(words=stream(0, 0), tau_init=2.0),
    "last": LastQuery(),
    "recent": RecentCorrelation(8),
}


@pytest.mark.parametrize("case", ALL)
def test_learned_sinks_take_their_share(case: str) -> None:
    """Sinks so large that nothing is left; sinks of minus infinity change nothing."""
    score = ALL[case]
    free = scores(score)
    assert scores(score, sinks=mx.full(4, 80.0)).max() < 1e-6 * free.max()
    assert np.allclose(scores(score, sinks=mx.full(4, -1e30)), free, atol=1e-6)


def test_learned_sinks_are_those_of_the_attention() -> None:
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    z = np.concatenate([fixture.Z, np.broadcast_to(sinks[:, None, None], (4, 48, 1))], axis=-1)
    want = fixture.softmax(z)[..., :48]
    given = mx.array(sinks.astype(np.float32))
    assert np.allclose(scores(SummedAttention(), given), fixture.group_mean(want.sum(axis=1)), atol=1e-5)
    assert np.allclose(scores(LastQuery(), given)[0], want[:, 47].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("case", ALL)
def test_holes_and_the_order_of_rows_do_not_count(case: str) -> None:
    """A row that was dropped and is still there changes no score of the others; shuffled rows, shuffled scores."""
    score = ALL[case]
    order = np.random.default_rng(0).permutation(47)
    index = np.concatenate([order[order != 20], [47]])
    found = []
    for rows, holes in ((index, []), (np.concatenate([order, [47]]), np.flatnonzero(order == 20))):
        store = Store(Recipe(Stream(), Stream()))
        store.append(DATA.k[:, :, rows.tolist()], DATA.v[:, :, rows.tolist()], 0)
        positions = rows.copy()
        positions[holes] = -1
        store.positions, store.holes = mx.array(positions.astype(np.int32))[None, None], len(holes) > 0
        score.observe(store, Step(DATA.q[:, :, 40:], SCALE, None, 48, True))
        found.append(np.delete(np.array(score.score(store, SCALE, None)[0]), holes, axis=-1))
    assert np.allclose(*found, rtol=1e-5, atol=1e-6)
    inorder = Store(Recipe(Stream(), Stream()))
    inorder.append(DATA.k, DATA.v, 0)
    keep = mx.array(np.sort(index).astype(np.int32))[None, None]
    inorder.keep(keep)
    score.observe(inorder, Step(DATA.q[:, :, 40:], SCALE, None, 48, True))
    want = np.array(score.score(inorder, SCALE, None)[0])
    assert np.allclose(found[0], want[:, np.argsort(np.argsort(index))], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("method", ["kivi", "turboquant_rvq"])
def test_packed_rows_are_scored_as_they_are_stored(case: str, method: str) -> None:
    """The scores of the decoded rows, without decoding them here; float32 products in another order."""
    data = tensors(140, repeats=2)
    cache = CompressedKVCache(KVCacheConfig(method=method, head_dim=64, bit_width_inlier=4))  # type: ignore[arg-type]
    feed(cache, data, [140])
    keys, values = cache.materialize()
    plain = Store(Recipe(Stream(), Stream()))
    plain.append(keys, values, 0)
    found = []
    for store in (cache._store, plain):
        ALL[case].observe(store, Step(data.q, 0.125, None, 140, True))
        found.append(np.array(ALL[case].score(store, 0.125, None)))
    assert cache._store.sealed and np.allclose(*found, rtol=1e-3, atol=1e-5)


def test_recent_correlation_remembers_no_choice() -> None:
    """Rows that another history left behind, under the same last queries: the same rows go."""
    score, rows = RecentCorrelation(8), [*range(3, 13), *range(32, 40)]
    found = []
    for chunks in ([40], [20, 20], [39, 1]):
        store = watched(score, DATA.part(0, 40), chunks)
        store.keep(mx.array(rows)[None, None])
        found.append(np.array(score.score(store, SCALE, None)))
    assert np.allclose(found[0], found[1], atol=1e-6) and np.allclose(found[0], found[2], atol=1e-6)
