"""Policies against the golden sets of the methods' specifications, and against first principles."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests import fixture
from tests.matrix import Tensors, feed, split, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import probe_rotation
from veloxquant_mlx.policies import scores, select

SCALE = fixture.SCALE


@pytest.fixture(scope="module")
def golden() -> Tensors:
    """Four query heads, two kv heads, 48 tokens of size 8."""
    return fixture.DATA


def kept(golden: Tensors, chunks: list[int], **fields: object) -> list[list[int]]:
    cache = CompressedKVCache(KVCacheConfig(head_dim=8, **fields))  # type: ignore[arg-type]
    feed(cache, golden, chunks, scale=SCALE)
    cache.end_prefill()
    return np.array(cache.positions[0]).tolist()


PAPER = {"method": "snapkv", "snap_budget": 16, "snap_obs_window": 8, "snap_n_sink": 0}
WINDOW = list(range(40, 48))
GOLDEN_SETS = {
    "paper": (PAPER, [[7, 8, 9, 10, 11, 21, 22, 23], [11, 12, 13, 14, 15, 18, 20, 24]]),
    "four sinks": (PAPER | {"snap_n_sink": 4}, [[0, 1, 2, 3, 7, 10, 21, 22], [0, 1, 2, 3, 12, 13, 14, 20]]),
}


@pytest.mark.parametrize("case", GOLDEN_SETS)
@pytest.mark.parametrize("extra", [{}, {"snap_batched_scoring": False}, {"snap_backend": "reference"}], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 48])
def test_snapkv_golden_sets(golden: Tensors, case: str, extra: dict, chunk: int) -> None:
    fields, past = GOLDEN_SETS[case]
    assert kept(golden, split(48, chunk), **fields, **extra) == [[*head, *WINDOW] for head in past]


def test_snapkv_backends_go_different_ways(golden: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scores what is stored, the other decoded float32 rows, one head at a time where asked: same tokens."""
    calls: list[tuple[int, ...]] = []
    original = scores.WindowAttention._seen
    monkeypatch.setattr(
        scores.WindowAttention, "_seen", lambda self, z, *rest: calls.append(z.shape) or original(self, z, *rest)
    )
    sets = []
    for extra in ({}, {"snap_backend": "reference"}, {"snap_batched_scoring": False}):
        calls.clear()
        sets.append(kept(golden, [48], **PAPER, **extra))
        assert calls == [(1, 1, 16, 48)] * 2 if "snap_batched_scoring" in extra else [(1, 2, 16, 48)]
    assert sets[0] == sets[1] == sets[2]


def test_snapkv_float16_rows(golden: Tensors) -> None:
    """snap_dtype casts what is stored; attention still answers in the model's dtype."""
    cache = CompressedKVCache(KVCacheConfig(method="snapkv", head_dim=8, snap_dtype="float16"))
    out = feed(cache, golden, [48], scale=SCALE)
    assert out.dtype == mx.float32 and cache.materialize()[0].dtype == mx.float32
    assert mx.array_equal(cache.materialize()[0], golden.k.astype(mx.float16).astype(mx.float32))
    assert cache.held_bytes()["window"] == 64 * 2 * 2 * 8 * 2


def test_snapkv_uses_real_queries_not_keys() -> None:
    """A token whose key no other key resembles, but that the last queries ask for, stays."""
    data = tensors(200, repeats=1)
    needle = mx.zeros(64).at[5].add(30.0)
    k = mx.where(mx.arange(200)[:, None] == 77, needle, data.k.at[..., 5].multiply(0.0))
    q = mx.where(mx.arange(200)[:, None] >= 192, needle, data.q)
    cache = CompressedKVCache(
        KVCacheConfig(method="snapkv", head_dim=64, snap_budget=32, snap_obs_window=8, snap_n_sink=0)
    )
    feed(cache, Tensors(q, k, data.v), [199, 1])
    assert all(77 in head for head in np.array(cache.positions[0]).tolist())


def test_snapkv_counts_learned_sinks_in_its_weights(golden: Tensors) -> None:
    """A learned sink takes its share of the window's weights, as it does in the model's own attention."""
    score = scores.WindowAttention(8)
    cache = CompressedKVCache(KVCacheConfig(method="snapkv", head_dim=8, snap_obs_window=8))
    feed(cache, golden, [48], scale=SCALE)
    free, held = (score.score(cache._store, SCALE, s)[..., :40] for s in (None, mx.full(4, 50.0)))
    assert np.array(held).max() < 1e-3 * np.array(free).max()


def test_kept_rows_are_the_original_rows() -> None:
    """Deferred eviction copies rows bit for bit: nothing is re-rotated, cast or merged."""
    data = tensors(300, (2, 2, 64, 64), dtype=mx.bfloat16)
    cache = CompressedKVCache(KVCacheConfig(method="snapkv", head_dim=64, snap_budget=50))
    feed(cache, data, [299, 1])
    index = cache.positions[..., None]
    for rows, original in zip(cache.materialize(), (data.k, data.v), strict=True):
        assert mx.array_equal(rows, mx.take_along_axis(original, mx.broadcast_to(index, rows.shape), axis=2))
    positions = np.array(cache.positions)
    assert (np.diff(positions, axis=-1) > 0).all() and (positions[..., :4] == np.arange(4)).all()
    assert (positions[..., -32:] == np.arange(268, 300)).all() and cache.offset == 300


def test_snapkv_chooses_again_on_a_later_turn() -> None:
    """Decoding only adds (the paper); the next turn's prompt is chosen from together with what stayed."""
    data = tensors(700)
    cache = CompressedKVCache(KVCacheConfig(method="snapkv", head_dim=64, snap_budget=64))
    feed(cache, data.part(0, 400), [399, *[1] * 1])
    assert cache.positions.shape[-1] == 64
    feed(cache, data.part(400, 450), [1] * 50)
    assert cache.positions.shape[-1] == 114 and "queries" not in cache._store.aux
    feed(cache, data.part(450, 700), [249, 1])
    assert cache.positions.shape[-1] == 64 and cache.offset == 700
    assert cache.positions[..., -1].tolist() == [[699, 699]]


def test_dropped_rows_are_the_only_difference() -> None:
    """Attention after eviction equals full attention in which the dropped columns are masked out."""
    data = tensors(310)
    cache = CompressedKVCache(KVCacheConfig(method="snapkv", head_dim=64, snap_budget=80))
    feed(cache, data.part(0, 300), [299, 1])
    visible = np.zeros((1, 4, 1, 310), bool)
    for head, positions in enumerate(np.array(cache.positions[0])):
        visible[0, 2 * head : 2 * head + 2, 0, [*positions, *range(300, 310)]] = True
    now = data.part(300, 310)
    cache.update_and_fetch(now.k, now.v)
    out = cache.attend(now.q, scale=0.125, mask="causal")
    allowed = mx.array(visible) & (mx.arange(310) <= mx.arange(300, 310)[:, None])
    want = reference.attention(data.q[:, :, 300:], data.k, data.v, 0.125, allowed)
    assert mx.allclose(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 48])
def test_streaming_golden_set(golden: Tensors, chunk: int) -> None:
    fields = {"method": "streaming_llm", "stream_n_sink": 4, "stream_window_size": 8}
    assert kept(golden, split(48, chunk), **fields) == [[0, 1, 2, 3, *WINDOW]]


ROPES = {
    "plain": nn.RoPE(32, base=10000),
    "traditional": nn.RoPE(32, traditional=True, base=500),
    "partial": nn.RoPE(16, base=10000),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("sinks", [0, 4])
def test_streaming_counts_positions_inside_the_cache(rope: nn.Module, sinks: int) -> None:
    """Every step equals attention whose keys are un-rotated, re-rotated at 0..n-1, with the query at n - 1 (paper).

    Float32 angles near position 400 are good to about 400 * 2^-24; sums of 32 products stay well below 1e-4.
    """
    q, k, v = (mx.random.normal((1, h, 400, 32), key=mx.random.key(h)) for h in (2, 1, 1))
    layer = LayerInfo(head_dim=32, value_dim=32, rope=probe_rotation(rope, 32))
    config = KVCacheConfig(method="streaming_llm", head_dim=32, stream_n_sink=sinks, stream_window_size=60)
    cache, worst = CompressedKVCache(config, layer), 0.0
    for i in range(400):
        now = slice(i, i + 1)
        cache.update_and_fetch(rope(k[:, :, now], offset=i), v[:, :, now])
        positions = (
            [*range(min(sinks, i + 1 - 60)), *range(max(0, i - 60), i + 1)] if i >= sinks + 60 else [*range(i + 1)]
        )
        positions = sorted({*range(min(sinks, i + 1)), *positions})
        rows = mx.array(positions)
        keys = rope(mx.take(k, rows, axis=2), offset=0)
        want = reference.attention(
            rope(q[:, :, now], offset=len(positions) - 1), keys, mx.take(v, rows, axis=2), 32**-0.5
        )
        out = cache.attend(rope(q[:, :, now], offset=i), scale=32**-0.5)
        worst = max(worst, np.abs(np.array(out) - np.array(want)).max())
    assert worst < 1e-4
    assert cache.offset == 400 and cache.positions.shape[-1] == sinks + 60


def test_streaming_is_bounded_for_ever() -> None:
    cache = CompressedKVCache(KVCacheConfig(method="streaming_llm", head_dim=64, stream_window_size=60))
    data, sizes = tensors(1000), set()
    for start in range(0, 1000, 50):
        feed(cache, data.part(start, start + 50), [20, *[1] * 30])
        sizes.add(cache.nbytes)
    assert sizes - {min(sizes)} == {cache.nbytes} and cache.positions.shape[-1] == 64


def test_top_settles_ties_by_age() -> None:
    score = mx.array([[[1.0, 3.0, 1.0, 3.0, -mx.inf, 1.0, 3.0], [0.0, -0.0, -1.0, -2.0, 5.0, 5.0, 5.0]]])
    assert select.top(score, mx.arange(7)[None, None], 4)[0].tolist() == [[[0, 1, 3, 6], [0, 4, 5, 6]]]
    assert select.top(mx.zeros((1, 1, 9)), mx.arange(9)[None, None], 5)[0].tolist() == [[[0, 1, 2, 3, 4]]]


@pytest.mark.parametrize("how", ["mean", "max"])
def test_pool(how: str) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32)
    fill = 0.0 if how == "mean" else -np.inf
    padded = np.pad(x, [(0, 0), (0, 0), (2, 2)], constant_values=fill)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 5, axis=-1)
    want = windows.sum(-1) / 5 if how == "mean" else windows.max(-1)
    assert np.allclose(np.array(scores.pool(mx.array(x), 5, how)), want, atol=1e-6)  # type: ignore[arg-type]
