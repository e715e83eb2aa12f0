"""Q-Filters: filters and golden sets of the specification, where filters come from, and the retention check."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.matrix import Tensors, feed, split, tensors
from tests.parts.test_knorm import best
from veloxquant_mlx import CacheStateError, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.artifacts.calibration import CalibrationArtifact
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.calibrate.qfilters import query_filters
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.policies import projection

# Six digits of the specification.
FILTERS = np.array(
    [
        [0.035855, -0.135909, 0.267108, 0.241471, 0.226207, -0.271727, -0.002064, -0.194690],
        [-0.029843, -0.450072, 0.391946, 0.459160, 0.034759, -0.037401, -0.057437, 0.208410],
    ]
)
GOLDEN = [[2, 3, 6, 8, 12, 20, 24, 27, 33, 44, 45, 47], [0, 1, 5, 11, 16, 18, 19, 25, 27, 29, 37, 41]]
SCORES = (fixture.K @ FILTERS[..., None])[..., 0]
QUIET = {"qfilters_on_low_retention": "ignore"}


def artifact(filters: mx.array | None = None, method: str = "qfilters") -> CalibrationArtifact:
    filters = mx.array(FILTERS.astype(np.float32)) if filters is None else filters
    return CalibrationArtifact(method, {0: {"filters": filters}})


def cache_of(**fields: Any) -> CompressedKVCache:
    return fixture.new_cache("qfilters", **{"qfilters_budget": 12, **QUIET, **fields})


def test_golden_filters() -> None:
    fitted = projection.fit(fixture.DATA.q, 2)
    # float32 eigenvectors of Gram matrices whose eigenvalues lie some per cent apart; six digits are given
    assert fitted.shape == (1, 2, 8) and np.allclose(np.array(fitted[0]), FILTERS, atol=2e-5)


def test_the_offline_fit_is_the_same() -> None:
    q = tensors(500, (1, 2, 16, 16), repeats=3).q + mx.random.normal((6, 1, 16), key=mx.random.key(4))
    offline, share = query_filters(np.array(q[0]), 2)
    assert np.allclose(np.array(projection.fit(q, 2)[0]), offline, atol=1e-4) and (share > 0.5).all()


def test_filters_point_to_where_more_than_half_of_the_queries_lie() -> None:
    one_sided = mx.abs(tensors(101, (1, 1, 8, 8), repeats=1).q)
    few = mx.where(mx.arange(101)[:, None] < 50, -one_sided, one_sided)
    for q, sign in ((one_sided, 1), (-one_sided, -1), (few, 1), (-few, -1)):
        assert bool((sign * projection.fit(q, 1).sum() > 0).item())
    # Exactly half is not more than half.
    assert projection.fit(mx.array([[[[1.0, 0.0], [-1.0, 0.0]]]]), 1).tolist() in ([[[1.0, 0.0]]], [[[-1.0, 0.0]]])


@pytest.mark.parametrize("factor", [1.0, 7.5])
def test_golden_sets_without_protection_of_the_newest(factor: float) -> None:
    filters = projection.fit(fixture.DATA.q, 2) * factor
    assert best(projection.project(fixture.DATA.k, filters), 12) == GOLDEN


def test_the_other_sign_keeps_the_other_half() -> None:
    score = projection.project(fixture.DATA.k, projection.fit(fixture.DATA.q, 2))
    assert all(sorted(a + b) == list(range(48)) for a, b in zip(best(score, 24), best(-score, 24), strict=True))


# Without an artifact filters are fitted when a token is dropped first: decoding would start on fewer queries.
SOURCES = [(source, chunks) for source in ("artifact", "prompt") for chunks in ([48], [47, 1], split(48, 7))]


@pytest.mark.parametrize("source, chunks", [*SOURCES, ("artifact", [1] * 48)], ids=str)
@pytest.mark.parametrize("sinks, recent, sign", [(0, 0, 1), (4, 0, 1), (2, 6, -1)])
def test_real_cache(source: str, chunks: list[int], sinks: int, recent: int, sign: int) -> None:
    """The fixture's own queries, all of them, and an artifact with their filters keep the same tokens."""
    fields: dict[str, Any] = {"qfilters_n_sink": sinks, "qfilters_recent": recent, "qfilters_sign": sign}
    cache = cache_of(**fields, store=artifact() if source == "artifact" else None)
    fixture.fill(cache, chunks)
    protected = [*range(sinks), *range(48 - max(recent, 1), 48)]
    assert fixture.kept(cache) == fixture.top(sign * SCORES, 12, protected)
    assert (source in " ".join(cache.describe()["notes"])) == (source == "artifact")


def test_the_receipt_says_where_filters_come_from() -> None:
    assert cache_of().describe()["notes"] != cache_of(store=artifact()).describe()["notes"]
    assert "depend on the context" in cache_of().describe()["notes"][0]


def test_a_state_with_filters_of_an_artifact_is_refused_without_it() -> None:
    cache = cache_of(store=artifact())
    fixture.fill(cache, [47, 1])
    with pytest.raises(CacheStateError, match="made with store"):
        CompressedKVCache.from_state(cache.state)


@pytest.mark.parametrize(
    "store, words",
    [
        (artifact(mx.zeros((3, 8))), r"\(3, 8\)"),
        (artifact(mx.zeros((2, 16))), r"\(2, 16\)"),
        (artifact(mx.zeros((1, 8))), r"\(1, 8\)"),
        (artifact(method="svdq"), "qfilters"),
    ],
    ids=["heads", "head size", "one head", "method"],
)
def test_filters_that_do_not_fit_are_refused(store: CalibrationArtifact, words: str) -> None:
    """Nothing is broadcast."""
    with pytest.raises(QuantizerConfigError, match=words):
        cache_of(store=store)


def test_filters_that_do_not_fit_are_refused_by_the_first_tokens() -> None:
    """Where nobody said how many heads there are, the first tensors do."""
    config = KVCacheConfig(method="qfilters", head_dim=8, store=artifact(mx.zeros((1, 8))))
    cache = CompressedKVCache(config, LayerInfo(head_dim=8, value_dim=8))
    with pytest.raises(QuantizerConfigError, match=r"\(1, 8\)"):
        cache.update_and_fetch(fixture.DATA.k, fixture.DATA.v)


def test_queries_of_the_prompt_decide_not_keys() -> None:
    """The same keys under queries that point the other way: the opposite half stays."""
    data, sets = tensors(48, (1, 2, 8, 8)), []
    for q in (data.q + 2, -data.q - 2):
        cache = cache_of(qfilters_n_sink=0, qfilters_budget=24)
        feed(cache, Tensors(q, data.k, data.v), [47, 1])
        sets.append(fixture.kept(cache))
    for head in range(2):
        assert set(sets[0][head]) & set(sets[1][head]) == {47}


@pytest.mark.parametrize("chunk", [1, 7, 64, 500])
def test_the_sample_is_even_and_does_not_depend_on_chunks(chunk: int) -> None:
    q, held, at = mx.arange(500, dtype=mx.float32)[None, None, :, None], None, 0
    for n in split(500, chunk):
        held = projection.thinned(held, q[:, :, at : at + n], at + n, 16)
        at += n
        step = int(np.array(held)[0, 0, 1, 0]) if held.shape[2] > 1 else 1
        assert min(at, 16) <= held.shape[2] <= 32
        assert held[0, 0, :, 0].tolist() == list(np.arange(0, at, step))


def test_calib_tokens_set_the_sample() -> None:
    data, held = tensors(300, (1, 2, 8, 8)), []
    for n in (1, 40):
        cache = cache_of(qfilters_budget=299, qfilters_calib_tokens=n)
        feed(cache, data.part(0, 299), [299])
        held.append(cache._store.aux["queries"].shape[2])
        feed(cache, data.part(299, 300), [1])
        assert set(cache._store.aux) == {"filters"}  # the sample is given up with the fit
    # At least as many as asked for and as a head is wide, fewer than twice as many.
    assert 8 <= held[0] <= 16 and 40 <= held[1] <= 80


def test_filters_stay_once_they_are_fitted() -> None:
    data = tensors(400, (1, 2, 8, 8))
    cache = cache_of()
    feed(cache, data.part(0, 100), [99, 1])
    filters = cache._store.aux["filters"]
    feed(cache, data.part(100, 400), [1] * 50 + [200] + [1] * 50)
    assert mx.array_equal(cache._store.aux["filters"], filters)
    want = projection.fit(data.part(0, 100).q, 2)
    assert mx.allclose(filters, want, atol=0.5)  # of a sample of the same queries
    assert set(cache._store.aux) == {"filters"}


def wide(**fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(method="qfilters", head_dim=8, **fields)  # type: ignore[arg-type]
    return CompressedKVCache(config, LayerInfo(head_dim=8, value_dim=8))


def test_the_defaults_warn_once_at_569_tokens() -> None:
    """512 of 569 tokens are less than nine in ten; of 568 they are not."""
    cache, data = wide(), tensors(700, (1, 2, 8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(cache, data.part(0, 568), [559, 1, *[1] * 8])
    with pytest.warns(UserWarning, match=r"qfilters_budget=512 keeps 512 of 569 tokens.*qfilters_min_retention=0\.9"):
        feed(cache, data.part(568, 569), [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(cache, data.part(569, 700), [1, 120, *[1] * 10])


def test_a_long_prompt_warns_at_its_end() -> None:
    for chunks in ([599, 1], [600]):
        cache = wide()
        with pytest.warns(UserWarning, match="keeps 512 of 600 tokens"):
            feed(cache, tensors(600, (1, 2, 8, 8)), chunks)
            cache.end_prefill()


def test_low_retention_can_be_an_error_or_nothing() -> None:
    data = tensors(200, (1, 2, 8, 8))
    with pytest.raises(QuantizerConfigError, match="keeps 100 of 200 tokens"):
        feed(wide(qfilters_budget=100, qfilters_on_low_retention="raise"), data, [199, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(wide(qfilters_budget=100, qfilters_on_low_retention="ignore"), data, [199, 1])
        feed(wide(qfilters_budget=100, qfilters_min_retention=None), data, [199, 1])
        feed(wide(qfilters_budget=100, qfilters_min_retention=0.5), data, [199, 1])


def test_a_copy_that_was_told_is_not_told_again() -> None:
    cache, data = wide(qfilters_budget=100), tensors(210, (1, 2, 8, 8))
    with pytest.warns(UserWarning):
        feed(cache, data.part(0, 200), [199, 1])
    loaded = CompressedKVCache.from_state(cache.state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(loaded, data.part(200, 210), [1] * 10)
