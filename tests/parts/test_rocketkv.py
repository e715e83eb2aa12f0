"""rocketkv: what follows from a prompt's length, the choice of rows per query, page summaries."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import fixture
from tests.fixture import DATA, SCALE, fill, kept, new_cache
from tests.matrix import Tensors, feed, identical, split, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory
from veloxquant_mlx.attention import entry, reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.core.types import LayerInfo, Recipe, Stream
from veloxquant_mlx.policies.retrieval import ROOM, HybridAttention, summaries
from veloxquant_mlx.policies.scores import WindowAttention, pool

PAPER: dict[str, Any] = {"rocketkv_n_sink": 0, "rocketkv_obs_window": 8}


def store_of(data: Tensors) -> Store:
    store = Store(Recipe(Stream(), Stream()))
    store.append(data.k, data.v, 0)
    return store


def small(ratio: float = 8.0, **fields: Any) -> CompressedKVCache:
    """Head size 64, 13 rows at least."""
    fields = {"rocketkv_obs_window": 8, **fields}
    config = KVCacheConfig(method="rocketkv", head_dim=64, rocketkv_compression_ratio=ratio, **fields)
    return CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64))


@pytest.mark.parametrize(
    ("ratio", "length", "plan"),
    [
        (2.0, 4096, (3420, 1, 76, 1024)),
        (4.0, 4096, (2628, 2, 99, 512)),
        (8.0, 4096, (1858, 2, 70, 256)),
        (8.0, 8192, (3717, 2, 70, 512)),
        (16.0, 16384, (4837, 3, 81, 512)),
        (64.0, 32768, (3191, 3, 61, 256)),
        (128.0, 131072, (6472, 3, 60, 512)),
    ],
)
def test_plan(ratio: float, length: int, plan: tuple[int, ...]) -> None:
    assert HybridAttention(ratio, 128, 37)(length) == plan[0]
    assert HybridAttention(ratio, 128, 37).plan(length) == plan


def test_plan_of_short_prompts_and_own_settings() -> None:
    """At least window, sinks and one more are kept and read; page and channels replace what the ratio says."""
    assert HybridAttention(8.0, 128, 37).plan(1) == (37, 1, 128, 37)
    assert HybridAttention(8.0, 128, 37, page=4).plan(4096)[1:3] == (4, 128)  # int(128 * 4 / 3.63), clipped
    assert HybridAttention(8.0, 128, 37, page=1).plan(4096)[1:3] == (1, 35)
    assert HybridAttention(8.0, 128, 37, channels=5).plan(4096)[1:3] == (2, 5)
    cache = small(rocketkv_page_size=5, rocketkv_head_topk1=7)
    feed(cache, tensors(400), [399, 1])
    assert cache.store.aux["pages"].shape == (1, 2, 128, 48) and cache.store.keys.n == 181  # 37 pages


def test_shares_of_storage_and_reads() -> None:
    """1858 of 4096 rows and half as much for summaries; 929 pages of 70 channels and 256 rows per token."""
    held, read = HybridAttention(8.0, 128, 37).shares(4096)
    assert held == pytest.approx(0.4536 * 1.5, abs=1e-3) and 1 / read == pytest.approx(8.03, abs=0.01)
    note = small(8.0).describe()["notes"][0]
    assert "68.1% is held" in note and "reads 12.5%" in note


GOLDEN = [
    (3, 4, [[9, 10, 11, 15, 16, 17, 21, 22, 23, 33, 34, 35], [24, 25, 26, *range(30, 36), 42, 43, 44]]),
    (
        1,
        8,
        [
            [0, 3, 10, 11, 17, 21, 22, 28, 29, 35, 36, 40],
            [3, 5, 11, 15, 18, 19, 20, 26, 27, 31, 41, 43],
        ],
    ),
]


@pytest.mark.parametrize(("page", "channels", "sets"), GOLDEN)
def test_golden_rows(page: int, channels: int, sets: list[list[int]]) -> None:
    """12 of 48 rows for the last query; pages of one row with all channels: the best by the mean attention itself."""
    hybrid, store = HybridAttention(1000.0, 8, 12, page, channels), store_of(DATA)
    hybrid.prepare(store, 48)
    q = DATA.q[:, :, 47:]
    chosen = hybrid.select(store, q, SCALE)
    assert chosen is not None and np.array(chosen[0]).tolist() == sets
    if page == 1:
        assert fixture.top(fixture.group_mean(fixture.A[:, 47]), 12) == sets
    out, path = entry.attention(store, q, SCALE, None, None, None, hybrid)
    visible = np.zeros((2, 48), bool)
    for head, rows in enumerate(sets):
        visible[head, rows] = True
    z = np.where(np.repeat(visible, 2, axis=0), fixture.Z[:, 47], -np.inf)
    want = np.einsum("hj,hjd->hd", fixture.softmax(z), np.repeat(fixture.V, 2, axis=0))
    assert path is entry.Path.RETRIEVED and np.allclose(out[0, :, 0], want, atol=2e-6)  # float32 sums of 12 products


@pytest.mark.parametrize("page", [2, 3, 7])
def test_estimates_are_bounds_for_single_heads(page: int) -> None:
    """One query head, all channels: no row of a page has a larger product than the page's estimate."""
    data = tensors(100, repeats=1)
    hybrid, store = HybridAttention(8.0, 64, 13, page, 64), store_of(data)
    hybrid.prepare(store, 100)
    logits, share = hybrid.logits(store, data.q[:, :, 99:], hybrid.plan(100))
    exact = np.array(data.q[:, :, 99:] @ data.k.swapaxes(-1, -2))[0, :, 0]
    estimate = np.array(logits)[0, :, 0]
    assert np.allclose(share, 1) and (estimate >= exact - 1e-4).all()  # float32 sums in another order
    assert all(len(np.unique(e[i : i + page])) == 1 for e in estimate for i in range(0, 100, page))


@pytest.mark.parametrize("page", [2, 3])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_summaries_grow_as_if_made_anew(page: int, dtype: mx.Dtype) -> None:
    """Bit for bit, across the ends of pages and of the room for them."""
    data, cache = tensors(400, (2, 2, 64, 64), dtype=dtype), small(rocketkv_page_size=page)
    feed(cache, data.part(0, 200), [199, 1])
    for start in range(200, 400, 40):
        feed(cache, data.part(start, start + 40), [1] * 40)
        pages = cache.store.aux["pages"]
        assert identical(pages, summaries(cache.store.keys.dense(), page)) and pages.dtype == dtype
    pages = cache.store.aux["pages"]
    assert pages.shape[3] > ROOM and mx.isfinite(pages).all()


def test_short_prompts_stay_exact() -> None:
    """Until there are more rows than a query reads; from then on the receipt names the other path."""
    data, cache = tensors(20), small()
    feed(cache, data.part(0, 13), [8, *[1] * 5])
    assert cache.describe()["attention"] == [entry.Path.FUSED.value]
    feed(cache, data.part(13, 14), [1])
    assert entry.Path.RETRIEVED.value in cache.describe()["attention"]


def stage_one(kernel: int, budget: int) -> list[list[int]]:
    """Stage 1 in numpy: weights of the last 8 queries summed over queries and heads, then the largest nearby."""
    a = fixture.A[:, 40:, :40].sum(axis=1).reshape(2, 2, 40).sum(axis=1)
    padded = np.pad(a, [(0, 0), (kernel // 2,) * 2], constant_values=-np.inf)
    pooled = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=1).max(axis=-1)
    return fixture.top(np.concatenate([pooled, np.full((2, 8), np.inf)], axis=1), budget)


@pytest.mark.parametrize("chunks", [[48], split(48, 7), [47, 1]], ids=str)
def test_first_stage(chunks: list[int]) -> None:
    cache = new_cache("rocketkv", **PAPER)
    fill(cache, chunks)
    assert kept(cache) == stage_one(63, 21)  # int(48 / 8 ** 0.38)
    sinks = new_cache("rocketkv", **{**PAPER, "rocketkv_n_sink": 4})
    fill(sinks, chunks)
    assert all(head[:4] == [0, 1, 2, 3] and head[-8:] == list(range(40, 48)) for head in kept(sinks))


def test_first_stage_without_pooling_is_snapkv() -> None:
    cache = new_cache("snapkv", snap_obs_window=8)
    fill(cache)
    one, two = (WindowAttention(8, 1, how).score(cache.store, SCALE, None) for how in ("max", "mean"))
    assert identical(one, two)
    assert fixture.top(np.array(one[0]), 16) == stage_one(1, 16)


@pytest.mark.parametrize("kernel", [1, 3, 5, 63])
def test_max_pooling(kernel: int) -> None:
    x = np.array(mx.random.normal((2, 3, 70), key=mx.random.key(kernel)))
    half = kernel // 2
    want = [[[row[max(i - half, 0) : i + half + 1].max() for i in range(70)] for row in head] for head in x]
    assert np.array_equal(np.array(pool(mx.array(x), kernel, "max")), np.array(want))


@pytest.mark.parametrize("page", [1, 2])
def test_packed_and_masked_rows_give_the_same(page: int) -> None:
    """Rows that are not gathered are shut out: the same numbers, within float32 sums in another order."""
    data, packing = tensors(150), KVCacheConfig(method="kivi", head_dim=64, bit_width_inlier=8, residual_length=32)
    fields = {"method": "rocketkv", "rocketkv_obs_window": 8, "rocketkv_page_size": page}
    outs = {}
    for name in ("float", "masked", "reference", "packed"):
        extra = {"enable_vectorized_attend": name != "reference"}
        config = KVCacheConfig(head_dim=64, **fields, **extra)  # type: ignore[arg-type]
        cache = CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64), packing if name == "packed" else None)
        feed(cache, data.part(0, 140), [139, 1])
        for i in range(140, 150):
            now = data.part(i, i + 1)
            cache.update_and_fetch(now.k, now.v)
            mask = mx.ones((1, i + 1), mx.bool_) if name == "masked" else None
            outs.setdefault(name, []).append(cache.attend(now.q, scale=0.125, mask=mask))
        paths = cache.describe()["attention"]
        assert (entry.Path.SHUT.value in paths) == (name in ("masked", "packed")), paths
    whole = {name: mx.concatenate(out) for name, out in outs.items()}
    assert mx.allclose(whole["masked"], whole["float"], atol=1e-5)
    assert mx.allclose(whole["reference"], whole["float"], atol=1e-5)
    assert mx.abs(whole["packed"] - whole["float"]).mean() < 0.02  # 8-bit codes; a row at the edge may differ


def test_a_later_prompt_is_read_in_full_and_chosen_again() -> None:
    data, cache = tensors(520), small()
    feed(cache, data.part(0, 300), [299, 1])
    feed(cache, data.part(300, 340), [1] * 40)
    assert cache.store.numbers == {"prompt": 300, "summed": 136 + 40}
    feed(cache, data.part(340, 500), [160])
    now = data.part(500, 501)
    cache.update_and_fetch(now.k, now.v)
    want = reference.attention(now.q, *cache.materialize(), 0.125)
    assert mx.allclose(cache.attend(now.q, scale=0.125), want, atol=1e-5)  # as every token of a prompt
    assert cache.store.numbers == {"prompt": 501, "summed": 227}
    assert identical(cache.store.aux["pages"], summaries(cache.store.keys.dense(), 2))
    cache.update_and_fetch(now.k, now.v)
    assert not mx.allclose(cache.attend(now.q, scale=0.125), reference.attention(now.q, *cache.materialize(), 0.125))


def test_a_hard_cap_is_refused() -> None:
    with pytest.raises(QuantizerConfigError, match="capacity=512.*rocketkv_compression_ratio"):
        KVCacheFactory.create(KVCacheConfig(method="rocketkv", capacity=512))
