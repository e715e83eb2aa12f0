"""MiniCache: what merging keeps and loses, rows that are retained, groups of caches, storage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import Tensors, identical, same_state, split, stored_bytes, tensors
from veloxquant_mlx import KVCacheConfig
from veloxquant_mlx.cache import joint
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.codecs.base import TILE, Codes
from veloxquant_mlx.codecs.joint import JointRows
from veloxquant_mlx.codecs.merged import MOST_RETAINED, Merged
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.methods import minicache

B, H, N, D = 2, 3, 90, 64
ALL = -1.0  # a threshold that merges everything, as random rows are never opposite


def random(shape: tuple[int, ...] = (B, H, N, D), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def near(x: np.ndarray, noise: float, seed: int = 1) -> np.ndarray:
    """Another layer: the same directions but for ``noise``, other norms."""
    scale = np.exp(random((*x.shape[:3], 1), seed + 7))
    return scale * (x + noise * random(x.shape, seed))


def beside(rows: Sequence[np.ndarray], dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.concatenate(rows, axis=1)).astype(dtype)


def codecs(members: int, threshold: float = ALL, t: float = 0.5, **more: Any) -> list[Merged]:
    return [Merged(threshold, t, members=members, member=j, **more) for j in range(members)]


def restored(rows: Sequence[np.ndarray], threshold: float = ALL, t: float = 0.5) -> tuple[list[np.ndarray], Codes]:
    """Float32 rows after a round trip, per layer, and the codes."""
    group = codecs(len(rows), threshold, t)
    codes = group[0].encode(beside(rows))
    return [np.array(codec.decode(codes)) for codec in group], codes


def length(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x.astype(np.float64), axis=-1)


def angle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    u, v = (a.astype(np.float64) / length(a)[..., None] for a in (x, y))
    return 2 * np.arctan2(length(u - v), length(u + v))


# ----------------------------------------------------------------------------------------------------------- merging


@pytest.mark.parametrize("members", [2, 3, 5])
def test_norms_stay(members: int) -> None:
    rows = [random(seed=j) for j in range(members)]
    for got, want in zip(restored(rows)[0], rows, strict=True):
        np.testing.assert_allclose(length(got), length(want), rtol=2**-11 + 1e-6)  # float16 norms


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
def test_rows_in_proportion_come_back(t: float) -> None:
    x = random()
    rows = [x, 3.7 * x]
    got, codes = restored(rows, 0.9, t)
    assert not mx.any(codes["m0.norms"] < 0)
    for a, b in zip(got, rows, strict=True):
        assert (length(a - b) <= (2**-11 + 1e-6) * length(b)).all()  # float16 norms


@pytest.mark.parametrize(("t", "layer"), [(0.0, 0), (1.0, 1)])
def test_ends_of_the_arc_are_the_layers(t: float, layer: int) -> None:
    rows = [random(), random(seed=1)]
    assert (angle(restored(rows, t=t)[0][layer], rows[layer]) < 1e-6).all()  # float32


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.3, 3.0])
@pytest.mark.parametrize("t", [0.2, 0.5, 0.6])
def test_directions_lie_on_the_arc(noise: float, t: float) -> None:
    """The direction is at ``t w`` from the first layer's; what a row loses is the chord over that angle."""
    x = random()
    rows = [x, near(x, noise)]
    (first, second), _ = restored(rows, t=t)
    w = angle(*rows)
    np.testing.assert_allclose(angle(first, rows[0]), t * w, rtol=1e-4, atol=5e-7)  # float32 unit vectors
    np.testing.assert_allclose(angle(second, rows[1]), (1 - t) * w, rtol=1e-4, atol=5e-7)
    for got, want, part in ((first, rows[0], t), (second, rows[1], 1 - t)):
        chord = 2 * length(want) * np.sin(part * w / 2)
        assert (np.abs(length(got - want) - chord) <= 2**-11 * length(want) + 1e-4 * chord + 1e-6).all()


def test_more_than_two_layers_share_the_mean_of_their_directions() -> None:
    rows = [random(seed=j) for j in range(3)]
    mean = np.sum([x / length(x)[..., None] for x in rows], axis=0)
    for got in restored(rows, t=0.1)[0]:
        assert (angle(got, mean) < 1e-6).all()


def test_a_row_of_zeros_takes_the_direction_of_the_other_layer() -> None:
    rows = [random(), random(seed=1)]
    rows[0][:, :, 3], rows[1][:, :, 5], rows[0][:, :, 7], rows[1][:, :, 7] = 0, 0, 0, 0
    got, codes = restored(rows, 0.9, 0.0)
    for x, y in zip(got, rows, strict=True):
        np.testing.assert_allclose(x[:, :, [3, 5, 7]], y[:, :, [3, 5, 7]], rtol=2**-10)  # float16 norms
    assert not mx.any(codes["m0.norms"][:, :, [3, 5]] < 0)


# --------------------------------------------------------------------------------------------------------- retention


def mixed(members: int = 2, n: int = N, dtype: mx.Dtype = mx.float16) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of layers that are alike, a third of which are not; and which."""
    x = random((B, H, n, D))
    rows = [x, *(near(x, 0.05, seed=j) for j in range(1, members))]
    odd = np.random.default_rng(5).random((B, H, n)) < 1 / 3
    rows[-1] = np.where(odd[..., None], random((B, H, n, D), seed=9), rows[-1])
    return [np.array(mx.array(r).astype(dtype).astype(mx.float32)) for r in rows], odd


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_retained_rows_are_exact(members: int, dtype: mx.Dtype) -> None:
    rows, odd = mixed(members, dtype=dtype)
    group = codecs(members, 0.9)
    codes = group[0].encode(beside(rows, dtype))
    assert np.array_equal(np.array(codes["m0.norms"] < 0), odd)
    assert codes["directions"].dtype == dtype
    for codec, want in zip(group, rows, strict=True):
        got = np.array(codec.decode(codes, dtype).astype(mx.float32))
        assert np.array_equal(got[odd], want[odd])
        assert not np.array_equal(got[~odd], want[~odd])


@pytest.mark.parametrize(("threshold", "share"), [(1.0, 1.0), (0.0, 0.5), (-1.0, 0.0)])
def test_ends_of_the_threshold(threshold: float, share: float) -> None:
    _, codes = restored([random(), random(seed=1)], threshold)
    # 540 pairs whose cosine is positive or negative alike: 0.5 within 5 standard deviations
    assert np.array(codes["m0.norms"] < 0).mean() == pytest.approx(share, abs=0.11 if share == 0.5 else 0)
    assert ("m1.exact" in codes) == (share > 0)


def test_the_threshold_is_that_of_the_cosine() -> None:
    rows = [random(), random(seed=1)]
    cosine = np.cos(angle(*rows))
    for threshold in (-0.1, 0.05, 0.2):
        _, codes = restored(rows, threshold)
        clear = np.abs(cosine - threshold) > 1e-5
        assert np.array_equal(np.array(codes["m0.norms"] < 0)[clear], (cosine < threshold)[clear])


@pytest.mark.parametrize("members", [2, 3])
def test_rows_that_no_direction_or_norm_can_stand_for_are_retained(members: int) -> None:
    """Opposite rows at any threshold, and norms beyond float16."""
    rows = [random(seed=j) for j in range(members)]
    if members == 2:
        rows[1][:, :, 3] = -2 * rows[0][:, :, 3]
    else:  # three directions at equal angles in a plane
        a, b = np.eye(D, dtype=np.float32)[:2]
        for j in range(3):
            rows[j][:, :, 3] = (np.cos(j * 2 * np.pi / 3) * a + np.sin(j * 2 * np.pi / 3) * b).astype(np.float32)
    rows[1][:, :, 5] *= 1e5
    rows[0][:, :, 7, 0] = 3e38
    got, codes = restored(rows)
    assert np.flatnonzero(np.array(codes["m0.norms"] < 0)[0, 0]).tolist() == [3, 5, 7]
    for x, y in zip(got, rows, strict=True):
        assert np.array_equal(x[:, :, [3, 5, 7]], y[:, :, [3, 5, 7]]) and np.isfinite(x).all()


def test_layers_that_are_too_different_stay_as_they_came() -> None:
    rows = [random(), random(seed=1)]
    x = beside(rows, mx.float16)
    for threshold, merges in ((0.9, False), (ALL, True)):
        for codec in codecs(2, threshold, fit_rows=N):
            bound = codec.bind(codec.fit(x))
            assert isinstance(bound, Merged if merges else JointRows)
            if not merges:
                own = bound.decode(bound.encode(x), mx.float16)
                assert identical(own, codec.parts(x)[codec.member])
                assert "100%" in bound.remarks({})[0]
    kept = mixed()[0]
    share = codecs(2, 0.9)[0].fit(beside(kept))["retained"]
    assert 0.25 < float(np.array(share)) < MOST_RETAINED


# ----------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("threshold", [ALL, 0.9], ids=["all merged", "a third retained"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("n", [1, N, TILE + 70])
def test_attention_on_codes_is_that_on_the_rows(threshold: float, dtype: mx.Dtype, n: int) -> None:
    x = beside(mixed(n=n)[0], dtype)
    q, p = mx.array(random((B, H, 4, D), seed=3)), mx.softmax(mx.array(random((B, H, 4, n), seed=4)), axis=-1)
    group = codecs(2, threshold)
    codes = group[0].encode(x)
    for codec in group:
        rows = codec.decode(codes)
        # float32 sums over 64 channels and n rows
        np.testing.assert_allclose(codec.scores(q, codes), q @ rows.swapaxes(-1, -2), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(codec.mix(p, codes), p @ rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threshold", [ALL, 0.9, 1.0])
def test_codes_can_be_cut_and_read_in_parts(threshold: float) -> None:
    group = codecs(3, threshold)
    codes = group[0].encode(beside(mixed(3)[0]))
    for start, stop in ((0, 0), (0, 13), (13, 57), (57, N), (0, N)):
        part = group[0].cut(codes, start, stop)
        assert all(a.size for name, a in part.items() if name.endswith("exact"))
        for codec in group:
            want = codec.decode(codes)[:, :, start:stop]
            assert identical(codec.rows(codes, start, stop), want)
            if start < stop:
                assert identical(codec.decode(part), want)


# ------------------------------------------------------------------------------------------------------------ groups


class Group:
    """Caches of layers that are merged, used as a model uses them."""

    def __init__(self, members: int = 2, dim: int = D, **fields: Any) -> None:
        config = KVCacheConfig(method="minicache", **fields)
        infos = [LayerInfo(dim, dim, rank=j, n_layers=members, member=j, members=members) for j in range(members)]
        self.caches = [CompressedKVCache(config, info) for info in infos]

    def feed(self, data: Sequence[Tensors], chunks: Sequence[int]) -> list[mx.array]:
        """Attention of every step and layer."""
        at, outs = self.caches[0].offset, []
        for n in chunks:
            joint.meet(self.caches)
            for cache, own in zip(self.caches, data, strict=True):
                now = own.part(at, at + n)
                cache.update_and_fetch(now.k, now.v)
                outs.append(cache.attend(now.q, scale=0.125, mask="causal" if n > 1 else None))
            mx.eval(outs[-1], [cache.state for cache in self.caches])
            at += n
        return outs

    def rows(self) -> list[mx.array]:
        return [x for cache in self.caches for x in cache.materialize()]

    @property
    def merged(self) -> list[int]:
        return [cache.store.keys.n_sealed for cache in self.caches]


def layers(members: int, tokens: int, dtype: mx.Dtype = mx.float16, odd: float = 0.2) -> list[Tensors]:
    """Layers whose keys and values are alike but for the share ``odd`` of (token, head) pairs."""
    first, out = tensors(tokens, (B, H, D, D)), []
    for j in range(members):
        other = tensors(tokens, (B, H, D, D), seed=10 + j)
        strange = mx.random.uniform(shape=(B, H, tokens, 1), key=mx.random.key(j)) < odd
        k, v = (mx.where(strange, y, (1 + j) * x + 0.05 * y) for x, y in ((first.k, other.k), (first.v, other.v)))
        out.append(Tensors(*(x.astype(dtype) for x in (other.q, k, v))))
    return out


@pytest.mark.parametrize(("members", "threshold"), [(2, 0.9), (3, ALL)])
def test_state_does_not_depend_on_chunks(members: int, threshold: float) -> None:
    data, states = layers(members, 400), []
    for chunks in ([400], split(400, 67), [1] * 5 + [255, 100] + [1] * 40):
        group = Group(members, minicache_retention_threshold=threshold)
        group.feed(data, chunks)
        assert group.merged == [384] * members
        states.append(group)
    for other in states[1:]:
        assert all(same_state(a, b) for a, b in zip(states[0].caches, other.caches, strict=True))


@pytest.mark.parametrize("size", [64, 16, 1])
def test_max_ctx_bounds_what_waits(size: int) -> None:
    group = Group(minicache_retention_threshold=ALL, minicache_max_ctx=size)
    group.feed(layers(2, 70), [1] * 70)
    assert group.merged == [70 // size * size] * 2
    assert not any("minicache_max_ctx" in note for cache in group.caches for note in cache.describe()["notes"])
    other = Group(minicache_max_ctx=size)
    other.feed(layers(2, 70), [70])
    assert any(f"minicache_max_ctx={size}" in note for note in other.caches[0].describe()["notes"])


@pytest.mark.parametrize("threshold", [ALL, 0.9])
@pytest.mark.parametrize("members", [2, 3, 5])
def test_bytes_are_those_of_the_formula(members: int, threshold: float) -> None:
    """Per tensor: one row for all layers, two bytes for each, and what is retained in all layers but the first."""
    tokens, sealed = 300, 256
    group = Group(members, minicache_retention_threshold=threshold)
    group.feed(layers(members, tokens, odd=0.05), [tokens])
    held, retained = [stored_bytes(cache) for cache in group.caches], 0
    for stream in (group.caches[0].store.keys, group.caches[0].store.values):
        assert stream.packed is not None
        retained += np.count_nonzero(np.array(stream.packed.codes["m0.norms"] < 0))
    assert (retained > 0) == (threshold > 0)
    norms, floats = 2 * B * H * sealed * 2, 2 * B * H * (tokens - sealed) * D * 2
    want = [norms + floats + (2 * B * H * sealed if j == 0 else retained) * D * 2 for j in range(members)]
    assert held == [n + 2 * 4 * (j == 0) for j, n in enumerate(want)]  # and the share that was found, once per tensor
    (note,) = {note for cache in group.caches for note in cache.describe()["notes"] if note.startswith("keys: ret")}
    assert note.startswith("keys: retention rate") and f"of {B * H * sealed:,} (token, head) pairs" in note


def test_layers_share_one_array() -> None:
    group = Group(minicache_retention_threshold=ALL)
    group.feed(layers(2, 256), [256])
    first, second = (cache.store.keys.packed for cache in group.caches)
    assert first is not None and second is not None
    assert first.codes["directions"] is second.codes["directions"]
    assert "directions" in group.caches[0].store.keys.arrays()
    assert list(group.caches[1].store.keys.arrays()) == ["m1.norms"]


@pytest.mark.parametrize("threshold", [ALL, 0.9])
def test_a_trim_leaves_merged_rows_as_they_are(threshold: float) -> None:
    """Tokens are merged one by one: what stays is not merged anew."""
    data = layers(2, 400)
    group = Group(minicache_retention_threshold=threshold)
    group.feed(data, [400])
    before = group.rows()
    for cache in group.caches:
        cache.trim(100)
    joint.meet(group.caches)
    assert group.merged == [300, 300]
    assert all(identical(now, then[:, :, :300]) for now, then in zip(group.rows(), before, strict=True))
    group.feed(data, [30, 70])
    assert group.merged == [384, 384]
    assert all(identical(now, then) for now, then in zip(group.rows(), before, strict=True))
    for cache in group.caches:
        cache.trim(300)
    joint.meet(group.caches)
    assert group.merged == [100, 100]
    assert all(identical(now, then[:, :, :100]) for now, then in zip(group.rows(), before, strict=True))


def test_attention_of_a_group_is_that_on_its_rows() -> None:
    data = layers(2, 400, mx.float32)
    group = Group(minicache_retention_threshold=0.9)
    group.feed(data, [399, 1])
    twin = copy.deepcopy(group.caches)
    rows = group.rows()
    for j, (cache, own) in enumerate(zip(group.caches, data, strict=True)):
        q = own.q[:, :, -1:]
        got = cache.attend(q, scale=0.125)
        want = mx.fast.scaled_dot_product_attention(q, rows[2 * j], rows[2 * j + 1], scale=0.125)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # float32 sums
    joint.meet(twin)
    assert all(same_state(a, b) for a, b in zip(group.caches, twin, strict=True))


def test_a_strange_beginning_leaves_a_group_alone() -> None:
    group = Group()
    data = layers(2, 400, odd=0.95)
    group.feed(data, [400])
    assert all(identical(x, y) for x, y in zip(group.rows(), [y for own in data for y in (own.k, own.v)], strict=True))
    notes = group.caches[1].describe()["notes"]
    assert any(note.startswith("values: rows stay as they came") for note in notes)
    assert sum(stored_bytes(cache) for cache in group.caches) == 2 * 2 * B * H * 400 * D * 2 + 8


# ------------------------------------------------------------------------------------------------------------ recipe


@pytest.mark.parametrize(("members", "notes"), [(2, 0), (3, 1)])
def test_more_than_two_layers_are_told_of_slerp_t(members: int, notes: int) -> None:
    recipe = minicache.recipe(KVCacheConfig(method="minicache"), LayerInfo(members=members))  # type: ignore[arg-type]
    assert len(recipe.notes) == notes and recipe.together == members
