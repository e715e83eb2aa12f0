"""NestedKV: anomaly scores and heads that compete, against golden sets and a float64 reading of the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.matrix import feed, split, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.policies import anomaly, select
from veloxquant_mlx.policies.anomaly import Anomaly
from veloxquant_mlx.policies.heads import Compete

SCORE = Anomaly(window=8, beta=3.0, tau=0.6, kappa=10.0)
UNIFORM = [[0, 1, 5, 8, 11, 15, 16, 20, 30, 36, 40, 45], [0, 1, 4, 7, 15, 23, 25, 26, 32, 38, 40, 41]]
COMPETING = [[0, 1, 5, 8, 11, 15, 16, 20, 24, 30, 36, 40, 45], [0, 1, 7, 15, 23, 25, 26, 32, 38, 40, 41]]
FIELDS: dict[str, Any] = {"nestedkv_budget": 12, "nestedkv_n_sink": 2, "nestedkv_window": 8}


@pytest.fixture
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The golden sets are for blocks of 16 tokens."""
    monkeypatch.setattr(anomaly, "block_length", lambda n: 16)
    yield


def everywhere(keys: mx.array) -> mx.array:
    return mx.ones(keys.shape[:3], mx.bool_)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def minmax(x: np.ndarray) -> np.ndarray:
    return (x - x.min()) / (x.max() - x.min()) if np.ptp(x) > 1e-9 else np.zeros_like(x)


def oracle(keys: np.ndarray, block: int, window: int, beta: float, tau: float, kappa: float) -> np.ndarray:
    """Scores ``(n,)`` of one head's keys ``(n, D)``, token by token in float64."""
    k = unit(keys.astype(np.float64))
    n = len(k)
    anchors = [
        [k.mean(0)] * n,
        [k[j // block * block : j // block * block + block].mean(0) for j in range(n)],
        [k[max(0, j - window + 1) : j + 1].mean(0) for j in range(n)],
    ]
    scales = np.stack([minmax(-(k * unit(np.stack(a))).sum(-1)) for a in anchors])
    tenth = max(1, round(0.1 * n))
    ordered = np.sort(scales, axis=-1)
    gaps = ordered[:, -tenth:].mean(-1) - ordered[:, :tenth].mean(-1)
    weights = np.array([0.4, 0.4, 0.2]) * np.exp(beta * gaps)
    blend = weights / weights.sum() @ scales
    surprise = minmax(scales.std(0))
    follow = 1 / (1 + np.exp(-kappa * (surprise - surprise.mean() - tau)))
    return (1 - follow) * blend + follow * scales.max(0)


def picks(score: mx.array, budget: int, share: float) -> list[list[int]]:
    """What heads that compete keep of the first sequence."""
    index, valid = Compete.sharing(budget, share).of(score, budget)
    pairs = zip(np.array(index[0]).tolist(), np.array(valid[0]).tolist(), strict=True)
    return [[i for i, real in zip(*pair, strict=True) if real] for pair in pairs]


@pytest.mark.usefixtures("blocks_of_16")
def test_golden_sets_without_protection_of_the_newest() -> None:
    keys = fixture.DATA.k
    rows = mx.arange(48)[None, None]
    score = select.protect(SCORE.of(keys, everywhere(keys)), rows, 2, 0, 48)
    assert select.top(score, rows, 12)[0][0].tolist() == UNIFORM == picks(score, 12, 1.0)
    assert picks(score, 12, 0.2) == COMPETING


@pytest.mark.usefixtures("blocks_of_16")
@pytest.mark.parametrize("chunks", [[48], [47, 1], split(48, 7)], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6, 1.0])
def test_real_cache_keeps_sinks_and_the_newest(chunks: list[int], alpha: float) -> None:
    cache = fixture.new_cache("nestedkv", **FIELDS, nestedkv_safeguard_alpha=alpha)
    fixture.fill(cache, chunks)
    scores = np.stack([oracle(k, 16, 8, 3.0, 0.6, 10.0) for k in fixture.K])
    assert fixture.kept(cache) == competition(scores, 12, alpha, [0, 1, 47])


def competition(score: np.ndarray, budget: int, alpha: float, protected: list[int]) -> list[list[int]]:
    """The rule of Ada-KV in numpy: safe rows of every head, then the best pairs of the layer."""
    score = score.copy()
    score[:, protected] = np.inf
    for head, own in enumerate(fixture.top(score, max(1, int(alpha * budget)) if alpha else 0)):
        score[head, own] = np.inf
    flat = fixture.top(score.reshape(1, -1), score.shape[0] * budget)[0]
    return [[i % score.shape[1] for i in flat if i // score.shape[1] == head] for head in range(score.shape[0])]


def test_blocks_grow_with_the_prompt() -> None:
    assert [anomaly.block_length(n) for n in (1, 4096, 5000, 8192, 100000)] == [128, 128, 156, 256, 256]


@pytest.mark.parametrize("n", [1, 2, 50, 300, 700])
def test_scores_against_the_formulas(n: int) -> None:
    keys = tensors(n, (1, 2, 16, 16)).k
    score = Anomaly(64, 3.0, 0.6, 10.0).of(keys, everywhere(keys))
    assert bool(((score >= 0) & (score <= 1)).all())
    want = np.stack([oracle(k, 128, 64, 3.0, 0.6, 10.0) for k in np.array(keys[0])])
    # Cosines are good to about 1e-6 of a spread near 1; the sigmoid's slope of 10 and the sum over n enlarge it.
    assert np.allclose(np.array(score[0]), want, atol=1e-4)


def test_a_factor_on_all_keys_of_a_head_changes_nothing() -> None:
    keys = fixture.DATA.k
    plain, scaled = (SCORE.of(x, everywhere(x)) for x in (keys, keys * mx.array([1e3, 1e-3])[:, None, None]))
    assert mx.allclose(plain, scaled, atol=1e-5)


@pytest.mark.usefixtures("blocks_of_16")
def test_limits_of_the_constants() -> None:
    """beta = 0 mixes by the prior alone; a flat gate goes half way to the strongest scale."""
    keys = fixture.DATA.k
    scales = np.stack([[minmax(-np.array(c)[0, h]) for h in range(2)] for c in anomaly.cosines(anomaly.unit(keys), 8)])
    prior = np.einsum("s,shn->hn", [0.4, 0.4, 0.2], scales)
    flat = Anomaly(8, 0.0, 0.6, 1e-9).of(keys, everywhere(keys))[0]
    assert np.allclose(np.array(flat), 0.5 * prior + 0.5 * scales.max(0), atol=1e-5)
    # The gate stays shut far above every surprise.
    shut = Anomaly(8, 0.0, 100.0, 10.0).of(keys, everywhere(keys))[0]
    assert np.allclose(np.array(shut), prior, atol=1e-5)
    far = Anomaly(8, 0.0, -100.0, 10.0).of(keys, everywhere(keys))[0]
    assert np.allclose(np.array(far), scales.max(0), atol=1e-5)


def test_a_short_prompt_is_one_block() -> None:
    whole, block, _ = anomaly.cosines(anomaly.unit(tensors(128).k), 64)
    assert mx.allclose(whole, block, atol=1e-6)


@pytest.mark.parametrize("n, window", [(5, 8), (64, 64), (65, 64), (1000, 7)])
def test_window_sums(n: int, window: int) -> None:
    x = tensors(n, (1, 1, 4, 4)).k
    rows = np.array(x[0, 0], np.float64)
    want = np.stack([rows[max(0, j - window + 1) : j + 1].sum(0) for j in range(n)])
    assert np.allclose(np.array(anomaly.window_sums(x, window)[0, 0]), want, rtol=1e-5, atol=1e-4)


def test_window_sums_do_not_drift() -> None:
    """A sum far from the start is exactly that of the same rows at the start: it holds no prefix of the prompt."""
    x = mx.tile(tensors(64, (1, 1, 4, 4)).k + 100, (1, 1, 2000, 1))
    sums = anomaly.window_sums(x, 64)
    assert mx.array_equal(sums[:, :, -64:], sums[:, :, 64:128])


def test_rows_that_do_not_differ_are_ranked_by_age() -> None:
    keys = mx.broadcast_to(tensors(1).k, (1, 2, 300, 64))
    assert not SCORE.of(keys, everywhere(keys)).any()


def test_holes_take_no_part() -> None:
    """Scores beside holes at the end of a block equal scores without them; a hole scores 0."""
    keys = tensors(100, (1, 2, 16, 16)).k
    holed = mx.pad(keys, [(0, 0), (0, 0), (0, 20), (0, 0)], constant_values=7.0)
    real = mx.broadcast_to(mx.arange(120) < 100, (1, 2, 120))
    score = SCORE.of(holed, real)
    assert mx.allclose(score[..., :100], SCORE.of(keys, everywhere(keys)), atol=1e-5)
    # What is written there does not show.
    other = SCORE.of(mx.where(real[..., None], holed, -3.0), real)
    assert mx.array_equal(other, score)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_competition(alpha: float) -> None:
    score = (
        np.random.default_rng(0).normal(size=(3, 4, 60)).astype(np.float32) + np.arange(4, dtype=np.float32)[:, None]
    )
    index, valid = Compete.sharing(20, alpha).of(mx.array(score), 20)
    counts = np.array(valid).sum(-1)
    assert index.shape == valid.shape == (3, 4, counts.max())
    for b in range(3):
        want = competition(score[b], 20, alpha, [])
        assert picks(mx.array(score[b : b + 1]), 20, alpha) == want and [len(head) for head in want] == list(counts[b])
        assert counts[b].sum() == 80 and counts[b].min() >= int(20 * alpha)


def test_every_head_is_sure_of_its_share() -> None:
    assert [Compete.sharing(12, share).safe for share in (0.0, 0.01, 0.2, 1.0)] == [0, 1, 2, 12]


def test_ties_go_to_lower_heads_and_older_rows() -> None:
    assert picks(mx.zeros((1, 2, 5)), 3, 0.0) == [[0, 1, 2, 3, 4], [0]]
    assert picks(mx.zeros((1, 2, 5)), 3, 0.7) == [[0, 1, 2, 3], [0, 1]]


def test_later_turns_choose_again_over_ragged_heads() -> None:
    """The layer's total is the same after every turn; sinks and the newest are in every head; holes are never kept."""
    data = tensors(700)
    cache = fixture.new_cache("nestedkv", nestedkv_budget=40)
    feed(cache, data.part(0, 300), [299, 1])
    counts = [len(head) for head in fixture.kept(cache)]
    assert sum(counts) == 80
    feed(cache, data.part(300, 350), [1] * 50)
    assert [len(head) for head in fixture.kept(cache)] == [n + 50 for n in counts]
    feed(cache, data.part(350, 700), [349, 1])
    kept = fixture.kept(cache)
    assert sum(map(len, kept)) == 80 and cache.offset == 700
    assert all(head[:4] == [0, 1, 2, 3] and head[-1] == 699 and len(set(head)) == len(head) for head in kept)


def test_equal_heads_are_not_padded() -> None:
    cache = fixture.new_cache("nestedkv", **FIELDS, nestedkv_safeguard_alpha=1.0)
    fixture.fill(cache)
    assert cache.positions.shape == (1, 2, 12) and not cache._store.holes


def test_a_hard_cap_needs_equal_heads() -> None:
    make = KVCacheFactory.create
    with pytest.raises(QuantizerConfigError, match="capacity=512.*nestedkv_safeguard_alpha=1"):
        make(KVCacheConfig(method="nestedkv", capacity=512))
    assert make(KVCacheConfig(method="nestedkv", capacity=512, nestedkv_safeguard_alpha=1.0))
