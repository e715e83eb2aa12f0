"""cam: what is added to the rows that follow a dropped one, over float rows and over codes."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests import fixture
from tests.fixture import DATA, fill, kept, new_cache
from tests.matrix import Tensors, feed, identical, same_state, split, tensors
from veloxquant_mlx import KVCacheConfig, KVCacheFactory
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.added import Added
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.exceptions import QuantizerConfigError
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import UnknownRotation, probe_rotation
from veloxquant_mlx.policies.merging import WIDTH, Spread

BUDGET, SINKS = 16, 2
SMALL: dict[str, Any] = {"cam_budget": BUDGET, "cam_n_sink": SINKS}
MEAN = SMALL | {"cam_merge": "mean", "cam_merge_gate": False}


def oracle(tokens: int, prompt: int, how: str = "mean", acc: bool = False, width: int = WIDTH) -> np.ndarray:
    """Effective values ``(2, BUDGET, 8)`` by position after ``tokens`` of the fixture, in float64, always merging."""
    k, v = fixture.K, fixture.V.copy()
    for newest in range(prompt, tokens):
        i = newest - BUDGET + SINKS
        after = np.arange(i + 1, newest + 1)[:width]
        if how == "sim_weighted":
            dots = np.einsum("hd,hjd->hj", k[:, i], k[:, after])
            norms = np.linalg.norm(k[:, i], axis=-1)[:, None] * np.linalg.norm(k[:, after], axis=-1)
            w = np.maximum(dots / norms, 0)
            w = w / w.sum(axis=1, keepdims=True)
        else:
            w = np.full((2, len(after)), 1 / len(after))
        v[:, after] += w[..., None] * v[:, i : i + 1]
    return v[:, [*range(SINKS), *range(tokens - BUDGET + SINKS, tokens)]]


def small(packing: KVCacheConfig | None = None, rope: Any = None, **fields: Any) -> CompressedKVCache:
    """Head size 64."""
    config = KVCacheConfig(method="cam", head_dim=64, **{"cam_budget": 64, **fields})
    return CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64, rope=rope), packing)


PACKING = {
    "rvq": KVCacheConfig(method="turboquant_rvq", head_dim=64, bit_width_inlier=4),
    "kivi": KVCacheConfig(method="kivi", head_dim=64, bit_width_inlier=8, residual_length=32),
}


@pytest.mark.parametrize("chunks", [[48], split(48, 7), [47, 1]], ids=str)
@pytest.mark.parametrize("fields", [{}, {"cam_merge_gate": False}, {"cam_merge": "drop"}], ids=str)
def test_a_prompt_is_cut_and_not_merged(chunks: list[int], fields: dict[str, Any]) -> None:
    cache = new_cache("cam", **{**SMALL, **fields})
    fill(cache, chunks)
    positions = [*range(SINKS), *range(48 - BUDGET + SINKS, 48)]
    assert kept(cache) == [positions]
    for rows, data in zip(cache.materialize(), (DATA.k, DATA.v), strict=True):
        assert identical(rows, data[:, :, positions])


@pytest.mark.parametrize("how", ["mean", "sim_weighted"])
def test_values_against_the_formula(how: str) -> None:
    """20 merges in a row, slots reused; float32 sums against float64."""
    cache = new_cache("cam", **{**MEAN, "cam_merge": how})
    fill(cache, [28, *[1] * 20], ends=False)
    keys, values = cache.materialize()
    assert np.allclose(values[0], oracle(48, 28 + 1, how), atol=1e-5)
    assert kept(cache) == [[*range(SINKS), *range(48 - BUDGET + SINKS, 48)]]
    assert identical(keys, DATA.k[:, :, kept(cache)[0]])


@pytest.mark.parametrize("packing", [None, *PACKING])
def test_mass_stays(packing: str | None) -> None:
    """Without the gate values sum to the same before and after a row is dropped, packed or not (1e-3 of their size)."""
    data = tensors(400)
    cache = small(PACKING.get(packing or ""), cam_merge="mean", cam_merge_gate=False, cam_budget=100)
    feed(cache, data.part(0, 350), [349, 1])
    start = np.array(cache.materialize()[1], np.float64).sum(axis=2)
    feed(cache, data.part(350, 400), [1] * 50)
    now = np.array(cache.materialize()[1], np.float64).sum(axis=2)
    came = np.array(data.v[:, :, 350:], np.float64).sum(axis=2)
    # Packed: the rows that came were packed in the meantime, with an error of their own.
    assert np.abs(now - start - came).max() < (1e-3 if packing is None else 0.3) * np.abs(start).max()
    assert packing is None or cache.store.sealed


@pytest.mark.parametrize("packing", PACKING)
@pytest.mark.parametrize("keys", [False, True])
def test_merging_on_codes(packing: str, keys: bool) -> None:
    """Over codes the numbers are those over float rows up to the codes' error; dropping alone is far from them.

    130 steps, in which rows are cleared away (32 hidden ones at most); the next prompt cuts the front off.
    """
    rope = probe_rotation(nn.RoPE(64), 64)
    data, outs = tensors(420), {}
    settings = {"float": None, "packed": PACKING[packing], "drop": None}
    for name, pack in settings.items():
        how = {"cam_merge": "drop"} if name == "drop" else {"cam_merge_gate": False, "cam_merge_keys": keys}
        cache = small(pack, rope=rope, **how)
        feed(cache, data.part(0, 250), [249, 1])
        feed(cache, data.part(250, 340), [1] * 90)
        clone = copy.deepcopy(cache)
        outs[name] = [feed(cache, data.part(340, 380), [1] * 40), feed(cache, data.part(380, 420), [10, *[1] * 30])]
        assert identical(feed(clone, data.part(340, 380), [1] * 40), outs[name][0])
        if name == "packed":
            assert cache.store.sealed and cache.store.values.added.at is not None
            assert (cache.store.keys.added.at is not None) == keys
            twin = CompressedKVCache.from_state(cache.state)
            assert same_state(twin, cache) and twin.nbytes == cache.nbytes
    for i in (0, 1):
        far, near = (float(mx.abs(outs[name][i] - outs["float"][i]).mean()) for name in ("drop", "packed"))
        assert near < far / 3


@pytest.mark.parametrize("packing", PACKING)
def test_every_path_sees_what_was_added(packing: str) -> None:
    """Single tokens, blocks of a prompt and the reference read the same sums."""
    data, cache = tensors(600), small(PACKING[packing], cam_merge_gate=False, cam_merge_keys=True)
    feed(cache, data.part(0, 300), [270, *[1] * 30])
    for length in (1, 200):
        twin, now = copy.deepcopy(cache), data.part(300, 300 + length)
        twin.update_and_fetch(now.k, now.v)
        mask = "causal" if length > 1 else None
        keys, values = (stream.dense(dtype=mx.float32) for stream in (twin.store.keys, twin.store.values))
        want = reference.attention(now.q, keys, values, 0.125, _shut(twin, length))
        assert mx.allclose(twin.attend(now.q, scale=0.125, mask=mask), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "evicting", [{"method": "cam", "cam_budget": 64}, {"method": "h2o", "h2o_budget": 64}], ids=str
)
@pytest.mark.parametrize("packing", ["turboquant_rvq", "cachegen", "gear", "zipcache"])
def test_looking_at_packed_rows_changes_nothing(evicting: dict[str, Any], packing: str) -> None:
    """Positions, rows and a state that is loaded elsewhere, while dropped rows are still there: not a bit."""
    configs = KVCacheConfig(head_dim=64, **evicting), KVCacheConfig(method=packing, head_dim=64)  # type: ignore[arg-type]
    data, layer = tensors(330), LayerInfo(head_dim=64, value_dim=64)
    cache, twin = (CompressedKVCache(configs[0], layer, configs[1]) for _ in range(2))
    for c in (cache, twin):
        feed(c, data.part(0, 270), [249, *[1] * 21])
    assert cache.store.dead == 20 and cache.positions.shape[-1] == cache.materialize()[0].shape[2] == 64
    loaded = CompressedKVCache.from_state(cache.state)
    want = feed(twin, data.part(270, 330), [1] * 60)
    assert identical(feed(cache, data.part(270, 330), [1] * 60), want)
    assert identical(feed(loaded, data.part(270, 330), [1] * 60), want)


def _shut(cache: CompressedKVCache, length: int) -> mx.array:
    positions = cache.store.positions_or_range()[0, 0]
    return (positions >= 0) & (positions <= mx.arange(cache.offset - length, cache.offset)[:, None])


def one_step(acc: list[float], **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values of the two kv heads before and after one decoded token, with summed attention as given by position."""
    cache = new_cache("cam", **{**SMALL, "cam_merge": "mean", **fields})
    fill(cache, [40])
    before = np.array(cache.materialize()[1][0])
    cache.store.row_aux["acc"] = mx.broadcast_to(mx.array(acc, mx.float32), (1, 2, BUDGET))
    now = DATA.part(40, 41)
    cache.update_and_fetch(now.k, now.v)
    cache.attend(now.q * 0, scale=1.0)  # every row gets the same attention, 1 / 17
    return before, np.array(cache.materialize()[1][0])


def test_one_step_by_hand() -> None:
    """As much attention as the mean of those that follow: merged for certain, 1/14 of the value to each."""
    before, after = one_step([1.0] * BUDGET)
    # The newest row's own sum is smaller, so that the mean is: probability 1.
    want = before[:, SINKS + 1 :] + before[:, SINKS : SINKS + 1] / (BUDGET - SINKS)
    assert np.allclose(after[:, SINKS:-1], want, atol=1e-6)


def test_no_attention_no_merge() -> None:
    """A probability of next to nothing (1/17 against millions) is dropping."""
    before, after = one_step([0.0] * (SINKS + 1) + [1e9] * (BUDGET - SINKS - 1))
    assert np.array_equal(after[:, SINKS:-1], before[:, SINKS + 1 :])
    _, dropped = one_step([0.0] * BUDGET, cam_merge="drop")
    assert np.array_equal(after, dropped)


def test_probability_of_the_gate() -> None:
    """A third of the mean attention: a third of 400 seeds merges, each head by a draw of its own (5 sigma: 0.12)."""
    merge = Spread((1, 2), SINKS)
    acc = mx.array([[[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    index = mx.arange(4)[None, None]
    opened = np.array(mx.concatenate([merge._open(acc, index, step) for step in range(400)])[..., 0])
    assert abs(opened[:, 0].mean() - 1 / 3) < 0.12 and not opened[:, 1].any() and opened[:, 2].all()
    both = mx.broadcast_to(acc[:, :1], (1, 2, 4))
    heads = np.array(mx.concatenate([merge._open(both, index, step) for step in range(400)])[..., 0])
    assert 0.2 < (heads[:, 0] != heads[:, 1]).mean() < 0.7  # 4/9


def test_seeds() -> None:
    def run(chunks: list[int], seed: int, layer: int = 0) -> mx.array:
        config = KVCacheConfig(method="cam", head_dim=64, cam_budget=64, seed=seed)
        mx.random.normal((3,))  # draws of others change nothing
        cache = CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64, index=layer))
        return feed(cache, tensors(200), chunks)[:, :, 150:]

    first = run([149, *[1] * 51], 1)
    assert identical(first, run([149, *[1] * 51], 1))
    assert mx.allclose(first, run([*split(149, 13), *[1] * 51], 1), atol=1e-5)
    assert not mx.allclose(first, run([149, *[1] * 51], 2), atol=1e-3)
    assert not mx.allclose(first, run([149, *[1] * 51], 1, layer=1), atol=1e-3)


def test_dropping_keeps_what_streaming_keeps() -> None:
    """Equal sizes: the same rows, bit for bit; cam counts original positions. Nothing is summed up for it."""
    data = tensors(200)
    cache, other = small(cam_merge="drop"), CompressedKVCache(KVCacheConfig("streaming_llm", 64, stream_window_size=60))
    for c in (cache, other):
        feed(c, data, [149, *[1] * 51])
    assert identical(cache.materialize()[1], other.materialize()[1])
    assert np.array_equal(cache.positions, other.positions)
    assert not cache.store.row_aux and not cache.needs_queries and small().needs_queries
    assert not small(cam_merge_gate=False).needs_queries


def test_width() -> None:
    """The 32 rows after the dropped one, and no others."""
    data, cache = tensors(200), small(cam_merge="mean", cam_merge_gate=False, cam_n_sink=0)
    feed(cache, data.part(0, 151), [149, 1, 1])
    changed = np.abs(np.array(cache.materialize()[1] - data.v[:, :, 87:151])).max(axis=(0, 1, 3))
    assert (changed[:WIDTH] > 0).all() and (changed[WIDTH:] == 0).all() and WIDTH == 32


def test_keys_move_towards_the_dropped_key() -> None:
    """One step in float64: turned by as many positions as there are in between, by equal weights."""
    rope = probe_rotation(nn.RoPE(8), 8)
    layer = LayerInfo(head_dim=8, value_dim=8, kv_heads=2, query_heads=4, rope=rope)
    cache = new_cache("cam", layer, **MEAN | {"cam_merge_keys": True})
    fill(cache, [40, 1, 1], ends=False)
    i, after = 42 - BUDGET + SINKS - 1, np.arange(42 - BUDGET + SINKS, 42)
    w, angle = 1 / len(after), (after - i)[:, None] * rope.rate
    k = fixture.K[:, i][:, None]
    turned = k * np.cos(angle) + k[..., rope.partner] * np.sin(angle)
    want = (1 - w) * fixture.K[:, after] + w * turned
    assert np.allclose(np.array(cache.materialize()[0][0, :, SINKS:]), want, atol=1e-5)
    assert not cache.describe()["notes"]
    assert "keys are merged as they are" in new_cache("cam", cam_merge_keys=True).describe()["notes"][0]


def test_bfloat16_sums_are_rounded_once_per_step() -> None:
    data = tensors(160, dtype=mx.bfloat16)
    cache = small(cam_merge="mean", cam_merge_gate=False)
    feed(cache, data, [149, *[1] * 11])
    wide = small(cam_merge="mean", cam_merge_gate=False)
    feed(wide, Tensors(*(x.astype(mx.float32) for x in (data.q, data.k, data.v))), [149, *[1] * 11])
    got, want = cache.materialize()[1], wide.materialize()[1]
    assert got.dtype == mx.bfloat16
    assert mx.allclose(got.astype(mx.float32), want, rtol=10 * 2**-8, atol=10 * 2**-8)  # 10 roundings of 2^-9


def test_added_numbers_move_with_their_rows() -> None:
    added, rows = Added(), mx.random.normal((1, 2, 3, 4), key=mx.random.key(0))
    added.put(mx.array([[[2, 3, 4]]]), rows)
    added.put(mx.array([[[3, 4, 5]]]), rows)
    want = np.zeros((2, 7, 4), np.float32)
    want[:, 3:6] = rows[0]
    want[:, 3:5] += np.array(rows)[0, :, 1:]
    assert np.allclose(added.to_rows(mx.zeros((1, 2, 7, 4)), 0)[0], want, atol=1e-6)
    assert np.allclose(added.to_rows(mx.zeros((1, 2, 2, 4)), 4)[0], want[:, 4:6], atol=1e-6)
    index = np.array([[0, 1, 3, 5, 6], [0, 2, 3, 4, 5]])
    added.move(mx.array(index)[None], 7)
    moved = np.take_along_axis(want, index[..., None], axis=1)
    assert np.allclose(added.to_rows(mx.zeros((1, 2, 5, 4)), 0)[0], moved, atol=1e-6)
    q, p = (mx.random.normal((1, 2, 6, d), key=mx.random.key(1)) for d in (4, 5))
    assert np.allclose(added.to_scores(mx.zeros((1, 2, 6, 5)), q)[0], np.array(q)[0] @ moved.swapaxes(1, 2), atol=1e-5)
    assert np.allclose(added.to_mix(mx.zeros((1, 2, 6, 4)), p)[0], np.array(p)[0] @ moved, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cam_budget": 5}, "cam_n_sink=4"),
        ({"cam_budget": 512, "capacity": 500}, "capacity=500"),
        ({"cam_merge": "drop", "cam_merge_keys": True}, "cam_merge_keys=True.*'sim_weighted'"),
    ],
)
def test_refusals(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(QuantizerConfigError, match=said):
        KVCacheFactory.create(KVCacheConfig(method="cam", **fields))
    assert KVCacheFactory.create(KVCacheConfig(method="cam", cam_budget=6))


def test_keys_that_cannot_be_moved_are_not_merged() -> None:
    layer = LayerInfo(rope=UnknownRotation("dynamic scaling"))
    with pytest.raises(QuantizerConfigError, match="cam_merge_keys=True.*dynamic scaling"):
        CompressedKVCache(KVCacheConfig(method="cam", cam_merge_keys=True), layer)
    assert CompressedKVCache(KVCacheConfig(method="cam"), layer)
