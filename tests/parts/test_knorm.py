"""knorm: golden sets of the specification; and what holds of every score that the key alone settles (qfilters too)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.matrix import Tensors, feed, split, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.artifacts.calibration import CalibrationArtifact
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods import knorm
from veloxquant_mlx.policies import select
from veloxquant_mlx.policies.norms import ROWS, KeyNorm

NORMS = np.linalg.norm(fixture.K, axis=-1)
GOLDEN = {
    0: [[0, 2, 3, 10, 13, 19, 25, 26, 39, 40, 41, 42], [0, 7, 9, 15, 16, 17, 23, 27, 29, 32, 37, 39]],
    4: [[0, 1, 2, 3, 10, 13, 19, 25, 26, 40, 41, 42], [0, 1, 2, 3, 7, 9, 16, 17, 23, 29, 32, 39]],
}
CHUNKS = [[48], [47, 1], split(48, 7), [10, *[1] * 38], [1] * 48]


def best(score: mx.array, budget: int, sinks: int = 0) -> list[list[int]]:
    """The selection with nothing protected but sinks."""
    rows = mx.arange(score.shape[-1])[None, None]
    kept, _ = select.top(select.protect(score, rows, sinks, 0, score.shape[-1]), rows, budget)
    return np.array(kept[0]).tolist()


def score_of(keys: mx.array, sign: int = -1) -> mx.array:
    return KeyNorm(sign).of(None, keys.astype(mx.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize("sinks", GOLDEN)
def test_golden_sets_without_protection_of_the_newest(sinks: int) -> None:
    assert best(score_of(fixture.DATA.k), 12, sinks) == GOLDEN[sinks]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("sinks, recent, keep", [(0, 0, "low"), (4, 0, "low"), (4, 5, "low"), (2, 3, "high")])
def test_real_cache(chunks: list[int], sinks: int, recent: int, keep: str) -> None:
    """However the tokens came, in one prompt, in chunks or decoded one by one: the best of them all, and the newest."""
    fields = {"knorm_n_sink": sinks, "knorm_recent": recent, "knorm_keep": keep}
    cache = fixture.new_cache("knorm", knorm_budget=12, **fields)
    fixture.fill(cache, chunks)
    protected = [*range(sinks), *range(48 - max(recent, 1), 48)]
    assert fixture.kept(cache) == fixture.top(NORMS if keep == "high" else -NORMS, 12, protected)


def test_high_and_low_keep_opposite_halves() -> None:
    low, high = (best(score_of(fixture.DATA.k, sign), 24) for sign in (-1, 1))
    assert all(sorted(a + b) == list(range(48)) for a, b in zip(low, high, strict=True))


def test_half_precision_keys_do_not_tie() -> None:
    """Rounded keys have distinct norms in float32; the norms themselves in bfloat16 would tie by the dozen."""
    keys = tensors(400, (1, 1, 64, 64)).k.astype(mx.bfloat16)
    cache = CompressedKVCache(KVCacheConfig(method="knorm", head_dim=64, knorm_budget=400))
    feed(cache, Tensors(keys, keys, keys), [399, 1])
    score = np.array(cache._store.row_aux[ROWS])[0, 0]
    assert score.dtype == np.float32 and len(np.unique(score)) == 400
    assert len(np.unique(np.array(mx.array(score).astype(mx.bfloat16).astype(mx.float32)))) < 200


def test_layers_can_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' setting skips the first two layers."""
    monkeypatch.setattr(knorm, "SKIP_LAYERS", (0, 1))
    for rank, held in ((0, 48), (1, 48), (2, 12)):
        cache = fixture.new_cache("knorm", LayerInfo(head_dim=8, value_dim=8, rank=rank), knorm_budget=12)
        fixture.fill(cache, [47, 1])
        assert cache.positions.shape[-1] == held and bool(cache.describe()["notes"]) == (rank < 2)


def test_holes_are_never_chosen() -> None:
    """Their position, -1, must not count as a great age; sinks are positions from 0 on."""
    positions, score = mx.array([[[-1, 0, 5, -1, 3]]]), mx.array([[[9.0, 1.0, 0.0, 9.0, 2.0]]])
    guarded = select.protect(score, positions, 1, 0, 6)
    assert select.top(guarded, positions, 3)[0].tolist() == [[[1, 4, 2]]]


FILTERS = mx.random.normal((2, 64), key=mx.random.key(9))
STATIC: dict[str, dict[str, Any]] = {
    "knorm": {"knorm_budget": 40},
    "qfilters": {
        "qfilters_budget": 40,
        "qfilters_on_low_retention": "ignore",
        "store": CalibrationArtifact("qfilters", {0: {"filters": FILTERS}}),
    },
}


def static(method: str, **fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(method=method, head_dim=64, **STATIC[method], **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", STATIC)
def test_one_by_one_equals_all_at_once(method: str) -> None:
    """A running best of static scores is the best of all: decoding, bounded chunks and one long prompt agree."""
    data, kept = tensors(400), []
    for chunks, fields in (
        ([399, 1], {}),
        ([60, *[1] * 340], {}),
        ([150, 1, *[1] * 49, 150, *[1] * 50], {}),
        (split(400, 33), {"capacity": 40}),
        ([1] * 400, {"capacity": 40}),
    ):
        cache = static(method, **fields)
        feed(cache, data, chunks)
        cache.end_prefill()
        kept.append(fixture.kept(cache))
    assert all(sets == kept[0] for sets in kept[1:]) and [len(head) for head in kept[0]] == [40, 40]


@pytest.mark.parametrize("method", STATIC)
def test_scores_stay_with_their_rows(method: str) -> None:
    """After slots were used again, rows moved and a second prompt: every row still has the score of its own key."""
    data, cache, at = tensors(400), static(method), 0
    for chunks in ([100], [1] * 30, [50], [1] * 20):
        feed(cache, data.part(at, at + sum(chunks)), chunks)
        at += sum(chunks)
        positions = np.array(cache._store.positions_or_range())
        keys = np.array(cache._store.keys.dense(), np.float64)[0]
        held = np.array(cache._store.row_aux[ROWS])
        for head in range(2):
            real = np.broadcast_to(positions, (1, 2, positions.shape[-1]))[0, head] >= 0
            rows = keys[head][real]
            want = -np.linalg.norm(rows, axis=-1) if method == "knorm" else rows @ np.array(FILTERS[head], np.float64)
            # float32 sums of 64 terms of order one to 25
            assert np.allclose(held[0, head][real], want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("method", STATIC)
def test_decoding_is_bounded(method: str) -> None:
    cache, data, sizes = static(method), tensors(300), set()
    feed(cache, data.part(0, 200), [199, 1])
    for i in range(200, 300):
        feed(cache, data.part(i, i + 1), [1])
        sizes.add(cache.nbytes)
        assert cache._store.live == 40 and cache._store.n <= 41
    assert len(sizes) == 1 and cache.offset == 300 and all(299 in head for head in fixture.kept(cache))


@pytest.mark.parametrize("packing", [{"method": "turboquant_rvq"}, {"method": "kivi", "residual_length": 32}], ids=str)
def test_packed_rows(packing: dict[str, Any]) -> None:
    """Dropped rows stay as holes among packed ones for a while: the same tokens as over float rows, turn by turn."""
    layer, data, at = LayerInfo(head_dim=64, value_dim=64), tensors(500), 0
    plain = static("knorm")
    config = KVCacheConfig(method="knorm", head_dim=64, **STATIC["knorm"])
    packed = CompressedKVCache(config, layer, KVCacheConfig(head_dim=64, **packing))
    for chunks in ([299, 1], [1] * 15, [79, 1], [1] * 25, [1, 49, 1]):
        for cache in (plain, packed):
            feed(cache, data.part(at, at + sum(chunks)), chunks)
        at += sum(chunks)
        assert plain._store.live == packed._store.live == 40
        real = np.array(packed._store.positions_or_range()) >= 0
        assert (real.sum(-1) == 40).all()
    assert fixture.kept(plain) == fixture.kept(packed)
