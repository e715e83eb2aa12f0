"""ChunkKV: golden sets, whole chunks on the grid of true positions, selections that layers share."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.fixture import DATA, A, K, fill, group_mean, kept, new_cache
from tests.matrix import Tensors, feed, split, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.options import ChunkKVOptions
from veloxquant_mlx.coordinators.reuse import Reuse
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods import chunkkv
from veloxquant_mlx.policies.chunks import Chunks
from veloxquant_mlx.policies.scores import pool

WINDOW = range(40, 48)
ATTENTION = A[:, 40:, :40].mean(axis=1)  # (4, 40): what the last 8 queries pay to each older token


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the golden sets, on the constant of 32."""
    monkeypatch.setattr(chunkkv, "OBS_WINDOW", 8)


def numbers(x: mx.array) -> list[int]:
    return np.array(x).tolist()


def cache(budget: int, size: int = 8, sinks: int = 4, **fields: Any) -> CompressedKVCache:
    """Of the fixture."""
    return new_cache("chunkkv", chunkkv_budget=budget, chunkkv_chunk_size=size, chunkkv_n_sink=sinks, **fields)


@pytest.mark.parametrize("chunk", [1, 7, 47, 48])
def test_golden_set(chunk: int) -> None:
    some = cache(28)
    fill(some, split(48, chunk))
    assert kept(some) == [[*range(4), *range(12, 28), *WINDOW]]


def reference(score: np.ndarray, budget: int, size: int, sinks: int) -> list[int]:
    """The specification's choice for one score per token before the window, by plain loops."""
    chunks = [list(range(i, min(i + size, 40))) for i in range(sinks, 40, size)]
    chosen, room = [], budget - sinks - 8
    for chunk in sorted(chunks, key=lambda c: (-score[c].mean(), c[0])):
        if len(chunk) > room:
            break
        chosen += chunk
        room -= len(chunk)
    return sorted([*range(sinks), *chosen, *WINDOW])


@pytest.mark.parametrize("budget", [20, 28, 31, 40, 44])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("score", ["attn_mass", "key_norm"])
def test_reference(budget: int, size: int, sinks: int, score: str) -> None:
    some = cache(budget, size, sinks, chunkkv_score=score)
    fill(some)
    means = ATTENTION.mean(axis=0) if score == "attn_mass" else -np.linalg.norm(K, axis=-1).mean(axis=0)
    want = reference(means, budget, size, sinks)
    assert kept(some) == [want]
    assert budget - size < len(want) <= budget


def test_key_norms_need_no_queries() -> None:
    assert not cache(28, chunkkv_score="key_norm").needs_queries and cache(28).needs_queries


def test_press() -> None:
    """kvpress with SnapKV's pooled scores and chunks of 10 from position 0 on, the window on top of the list."""
    pooled = np.array(pool(mx.array(group_mean(ATTENTION)), 5, "mean"))
    score = np.concatenate([pooled, np.full((2, 8), pooled.max() + 1)], axis=1).sum(axis=0)
    means = [score[i : i + 10].mean() for i in range(0, 48, 10)]
    best = np.argsort(means)[::-1][: int(len(means) * 0.5)]
    assert sorted(t for i in best for t in range(10 * i, min(10 * i + 10, 48))) == [*range(10, 20), *WINDOW]


def test_chunks_of_one_are_the_best_tokens() -> None:
    some = cache(16, size=1, sinks=0)
    fill(some)
    best = np.argsort(-ATTENTION.mean(axis=0), kind="stable")[:8]
    assert kept(some) == [[*sorted(best.tolist()), *WINDOW]]


def test_later_turns_split_where_positions_jump() -> None:
    """Chunks that were kept stay whole; the rest of the old window and the decoded tokens fill the same grid."""
    data = tensors(300)
    some = CompressedKVCache(KVCacheConfig(method="chunkkv", head_dim=64, chunkkv_budget=60, chunkkv_chunk_size=8))
    feed(some, data.part(0, 150), [149, 1])
    feed(some, data.part(150, 170), [1] * 20)
    before = set(numbers(some.positions[0, 0]))
    feed(some, data.part(170, 300), [129, 1])
    after = numbers(some.positions[0, 0])
    assert 52 < len(after) <= 60 and after[:4] == [0, 1, 2, 3] and after[-8:] == list(range(292, 300))
    held = before | set(range(170, 300))
    body = set(after[4:-8])
    for start in range(4, 292, 8):
        cell = {p for p in range(start, start + 8) if p in held and p < 292}
        runs = np.split(sorted(cell), np.flatnonzero(np.diff(sorted(cell)) != 1) + 1) if cell else []
        assert all(set(run.tolist()) <= body or not set(run.tolist()) & body for run in runs)


def test_jumps_end_chunks() -> None:
    score = mx.array([[[np.inf, 1.0, 9.0, 9.0, 1.0, 1.0, 1.0, np.inf]]])
    positions = mx.array([[[0, 1, 3, 4, 5, 6, 7, 9]]])
    # chunks {1}, {3, 4}, {5, 6, 7}: the grid has lines at 1 and 5, and position 2 is gone
    index, valid = Chunks(4, sinks=1).of(score, positions, 5)
    assert index.tolist() == [[[0, 1, 2, 3, 7]]] and valid is None


def test_sequences_of_one_cache_choose_for_themselves() -> None:
    """A last chunk that is short fits in one sequence only: the other is padded, and attention does not see that."""
    score = np.full((2, 1, 11), np.inf)
    score[:, 0, :6] = [[1, 1, 1, 1, 5, 5], [5, 5, 5, 5, 1, 1]]
    index, valid = Chunks(4, sinks=0).of(mx.array(score.astype(np.float32)), mx.arange(11)[None, None], 10)
    assert index.tolist() == [[[*range(4, 11), 0, 0]], [[0, 1, 2, 3, *range(6, 11)]]] and valid is not None
    assert valid.tolist() == [[[True] * 7 + [False] * 2], [[True] * 9]]
    data = tensors(150, (3, 2, 64, 64))
    options = ChunkKVOptions(chunkkv_budget=61, chunkkv_chunk_size=7, chunkkv_n_sink=3)
    config = KVCacheConfig(method="chunkkv", head_dim=64, options=options)
    together = CompressedKVCache(config)
    out = feed(together, data, [100, 39, *[1] * 11])
    widths = set()
    for i in range(3):
        one = CompressedKVCache(config)
        part = Tensors(data.q[i : i + 1], data.k[i : i + 1], data.v[i : i + 1])
        assert mx.allclose(out[i : i + 1], feed(one, part, [100, 39, *[1] * 11]), rtol=1e-4, atol=1e-5)
        mine = together.positions[i, 0]
        assert [p for p in numbers(mine) if p >= 0] == numbers(one.positions[0, 0])
        widths.add(one.positions.shape[-1])
    assert len(widths) > 1  # or padding was not tested


# ---------------------------------------------------------------------------------------------------- layers that share


def layers(count: int, reuse: int) -> list[CompressedKVCache]:
    """Caches as for a model of ``count`` layers."""
    config = KVCacheConfig(method="chunkkv", head_dim=64, chunkkv_budget=60, chunkkv_reuse_layers=reuse)
    info = LayerInfo(head_dim=64, value_dim=64, kv_heads=2, n_layers=count)
    return [CompressedKVCache(config, dataclasses.replace(info, rank=rank)) for rank in range(count)]


def run(caches: list[CompressedKVCache], chunks: list[int], start: int = 0, link: bool = True) -> None:
    """Feed all layers, each with data of its own, one forward after another."""
    for n in chunks:
        if link:
            coordinator = caches[0].coordinator
            assert coordinator is not None
            coordinator.before(None, mx.zeros((1, n), mx.int32), caches, lambda: caches)
        for i, some in enumerate(caches):
            feed(some, tensors(400, seed=10 * i).part(start, start + n), [n])
        start += n


@pytest.mark.parametrize(
    ("reuse", "groups"), [(2, [[0, 1], [2, 3], [4]]), (3, [[0, 1, 2], [3, 4]]), (5, [[0, 1, 2, 3, 4]])]
)
def test_layers_share_the_choice_of_the_first(reuse: int, groups: list[list[int]]) -> None:
    caches = layers(5, reuse)
    run(caches, [100, 99, 1])
    own = layers(5, reuse)
    run(own, [100, 99, 1], link=False)  # no forward links them: each chooses for itself
    sets = [numbers(some.positions[0, 0]) for some in caches]
    alone = [numbers(some.positions[0, 0]) for some in own]
    for group in groups:
        assert all(sets[i] == alone[group[0]] for i in group)
    assert all(a != b for a, b in itertools.pairwise(alone))
    run(caches, [1] * 5 + [50, 1], start=200)  # and once more on the next turn
    later = [numbers(some.positions[0, 0]) for some in caches]
    assert all(later[i] == later[group[0]] for group in groups for i in group) and later[0] != sets[0]


def test_a_layer_with_other_rows_chooses_for_itself() -> None:
    caches = layers(2, 2)
    feed(caches[1], tensors(3, seed=99), [3])
    run(caches, [199, 1])
    assert numbers(caches[0].positions[0, 0]) != numbers(caches[1].positions[0, 0])


def test_end_prefill_shares_too_and_copies_are_apart() -> None:
    caches = layers(2, 2)
    run(caches, [200])
    twins = [copy.deepcopy(some) for some in caches]
    for some in (*caches, *twins):
        some.end_prefill()
    first, second, own = (numbers(some.positions[0, 0]) for some in (*caches, twins[1]))
    assert first == second != own


def test_notes() -> None:
    shared = cache(28, chunkkv_reuse_layers=2)
    assert shared.coordinator == Reuse(2) and "chooses its own tokens" in shared.describe()["notes"][0]
    assert cache(28).coordinator is None and not cache(28).describe()["notes"]


def test_kept_rows_are_whole_and_untouched() -> None:
    some = cache(28)
    fill(some)
    index = some.positions[0, 0]
    for rows, original in zip(some.materialize(), (DATA.k, DATA.v), strict=True):
        assert mx.array_equal(rows, mx.take(original, index, axis=2))
