"""a2ats: the metric and its codes, codebooks from every source, what a query reads, the estimate at one distance."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import Tensors, a2ats, feed, identical, same_state, stored_bytes, tensors
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, KVCacheFactory, QuantizerConfigError
from veloxquant_mlx.artifacts import CalibrationArtifact
from veloxquant_mlx.attention.entry import Path as Way
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.calibrate import fit_artifact
from veloxquant_mlx.codecs.product import entries_of, nearest
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.rope import Rotation
from veloxquant_mlx.policies.index import SINKS, VectorIndex, factored, fit_books, kmeans, lower, moments, upper

SMALL: dict[str, Any] = {"a2ats_codebook_bits": 4, "a2ats_window": 32}


@cache
def rope(dim: int = 64, base: float = 10000.0) -> Rotation:
    half = np.arange(dim // 2)
    rate = base ** (-2 * half / dim)
    return Rotation(np.concatenate([half + dim // 2, half]).astype(np.int32), np.concatenate([-rate, rate]))


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def skewed(*shape: int, seed: int = 0) -> mx.array:
    """Queries whose channels are of very different sizes."""
    return normal(*shape, seed=seed) * mx.exp(1.5 * normal(shape[-1], seed=99))


def cache_of(rotation: Rotation | None = None, **fields: Any) -> CompressedKVCache:
    config = KVCacheConfig(**{"method": "a2ats", "head_dim": 64, **SMALL, **fields})
    return CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64, rope=rotation, query_heads=4))


def index_of(made: CompressedKVCache) -> VectorIndex:
    ev = made._recipe.eviction
    assert ev is not None and isinstance(ev.retrieval, VectorIndex)
    return ev.retrieval


def clustered(n: int, heads: int = 2, seed: int = 0) -> Tensors:
    """Keys around 64 centres per head; queries that look for some of them. No positions."""
    centres = normal(1, heads, 64, 64, seed=seed)
    which = mx.random.randint(0, 64, (1, heads, n), key=mx.random.key(seed + 1))
    keys = mx.take_along_axis(centres, which[..., None], axis=2) + 0.15 * normal(1, heads, n, 64, seed=seed + 2)
    wanted = mx.random.randint(0, 64, (1, heads, n), key=mx.random.key(seed + 3))
    queries = mx.take_along_axis(centres, wanted[..., None], axis=2) + 0.3 * normal(1, heads, n, 64, seed=seed + 4)
    return Tensors(mx.repeat(queries, 2, axis=1), keys, normal(1, heads, n, 64, seed=seed + 5))


@pytest.mark.parametrize("shrink", [0.0, 0.5, 1.0])
def test_scores_of_both_sides_of_the_metric(shrink: float) -> None:
    """``q . k = (q L^-T) . (k L)``, to 1e-5 of the sizes; one matrix holds both factors."""
    q, k = skewed(1, 2, 400, 64), normal(1, 2, 300, 64, seed=1)
    h = moments(q, 2)
    assert np.allclose(h[0, 1], np.array(q[0, 1]).T @ np.array(q[0, 1]) / 400, rtol=1e-4, atol=1e-4)
    metric = factored(h, shrink)
    y, z = q @ upper(metric), k @ lower(metric)
    size = mx.sqrt(mx.square(y).sum(-1))[..., None] * mx.sqrt(mx.square(z).sum(-1))[:, :, None]
    assert mx.all(mx.abs(y @ z.swapaxes(-1, -2) - q @ k.swapaxes(-1, -2)) <= 1e-5 * size)
    want = np.array(h, dtype=np.float64)
    want = (1 - shrink) * want / (np.trace(want, axis1=-2, axis2=-1)[..., None, None] / 64) + shrink * np.eye(64)
    got = np.array(lower(metric), dtype=np.float64)
    assert np.allclose(got @ got.swapaxes(-1, -2), want + 1e-6 * np.eye(64), atol=1e-5)


def test_a_metric_without_queries_is_euclidean() -> None:
    assert np.allclose(lower(factored(mx.zeros((1, 8, 8)), 0.0)), np.eye(8), atol=1e-6)


def test_moments_pool_the_query_heads_of_a_kv_head() -> None:
    q = normal(1, 4, 50, 16)
    pairs = [moments(q[:, i : i + 1], 1) for i in range(4)]
    assert mx.allclose(
        moments(q, 2), mx.concatenate([(pairs[0] + pairs[1]) / 2, (pairs[2] + pairs[3]) / 2], 1), atol=1e-5
    )


def test_query_aware_codes_err_less_where_queries_look() -> None:
    """beta = 0: on queries never seen, the error of scores is below that of a Euclidean codebook."""
    keys, seen, unseen = normal(1, 1, 1000, 64), skewed(1, 1, 1000, 64, seed=1), skewed(1, 1, 500, 64, seed=2)
    errors = []
    for shrink in (0.0, 1.0):
        metric = factored(moments(seen, 1), shrink)
        z = keys @ lower(metric)
        books = fit_books(z, 4, 8, 0)
        index = VectorIndex(4, 8, 0, 0, 0.2, shrink, metric=metric[0], books=books[0])
        got = _coded(index, z)
        scores = unseen @ upper(metric) @ (got - z).swapaxes(-1, -2)
        errors.append(float(mx.square(scores).mean()))
    assert errors[0] < 0.8 * errors[1]


def _coded(index: VectorIndex, z: mx.array) -> mx.array:
    assert index.books is not None
    return entries_of(nearest(z, index.books), index.books)


def test_kmeans() -> None:
    """Finds separate clusters, in every group by itself; error on normal numbers as the specification has it."""
    centres = 20 * normal(3, 16, 8)
    x = mx.repeat(centres, 30, axis=1) + 0.1 * normal(3, 480, 8, seed=1)
    found = kmeans(x, 16, seed=0)
    near = mx.square(centres[:, :, None] - found[:, None]).sum(-1).min(axis=-1)
    assert mx.all(near < 0.1)
    assert mx.array_equal(found, kmeans(x, 16, seed=0)) and not mx.array_equal(found, kmeans(x, 16, seed=1))
    own, x = kmeans(normal(1, 8192, 2), 256, seed=0), normal(1, 4000, 2, seed=1)
    error = mx.square(x[:, :, None] - own[:, None]).sum(-1).min(axis=-1).mean() / 2
    assert float(error) == pytest.approx(0.0085, rel=0.15)  # d = 2, 8 bits; 32 rows per centre


def test_everything_read_is_full_attention() -> None:
    """fraction = 1, bit for bit."""
    data = tensors(200)
    outs = feed(cache_of(rope(), a2ats_retrieval_fraction=1.0), data, [180, *[1] * 20])
    for t in range(180, 200):
        q, k, v = data.q[:, :, t : t + 1], data.k[:, :, : t + 1], data.v[:, :, : t + 1]
        assert identical(outs[:, :, t : t + 1], mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125))


def test_what_a_query_reads() -> None:
    """Sinks, the window and the best of the others by the estimate, for each kv head; softmax over those alone."""
    data, made = tensors(301), cache_of(rope())
    out = feed(made, data, [299, 1, 1])[:, :, -1:]
    twin = cache_of(rope())
    feed(twin, data.part(0, 300), [299, 1])
    now = data.part(300, 301)
    twin.update_and_fetch(now.k, now.v)
    index, far = index_of(twin), 301 - SINKS - 32
    chosen = index.select(twin.store, now.q, 0.125)
    assert chosen is not None and chosen.shape == (1, 2, SINKS + 32 + -(-far // 5))
    promise = np.array(index.promise(twin.store, now.q))[0]
    for head, rows in enumerate(np.array(chosen)[0]):
        best = SINKS + np.argsort(-promise[head, SINKS:-32])[: -(-far // 5)]
        assert sorted(rows.tolist()) == sorted([*range(SINKS), *best.tolist(), *range(269, 301)])
    mask = mx.repeat(mx.put_along_axis(mx.zeros((1, 2, 301), mx.bool_), chosen, mx.array(True), axis=-1), 2, axis=1)
    want = mx.fast.scaled_dot_product_attention(now.q, data.k, data.v, scale=0.125, mask=mask[:, :, None])
    assert mx.allclose(out, want, rtol=1e-4, atol=1e-5)
    assert Way.RETRIEVED.value in made.describe()["attention"]
    several = tensors(305)
    verified = feed(made, several.part(301, 305), [4])  # drafts read everything
    keys, values = (
        mx.concatenate([a, b], axis=2) for a, b in ((data.k, several.k[:, :, 301:]), (data.v, several.v[:, :, 301:]))
    )
    want = mx.fast.scaled_dot_product_attention(several.q[:, :, 301:], keys, values, scale=0.125, mask="causal")
    assert mx.allclose(verified, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dim", "repeats"), [(40, 7), (80, 1), (512, 6)])
def test_estimates_of_any_head(dim: int, repeats: int) -> None:
    """What the index promises is the product with the rows that codes stand for, to float32 sums."""
    data = tensors(140, (2, 1, dim, dim), repeats)
    config = KVCacheConfig(method="a2ats", **SMALL)
    made = CompressedKVCache(config, LayerInfo(head_dim=dim, value_dim=dim, query_heads=repeats))
    feed(made, data, [138, 1, 1])
    index, store = index_of(made), made.store
    metric = store.aux["metric"]
    z = index._plain(data.k, 0) @ lower(metric)
    for i in range(2):
        rows = entries_of(nearest(z[i : i + 1], store.aux["books"][i]), store.aux["books"][i])
        q = index._far(data.q[i : i + 1, :, -1:], mx.array([139])).reshape(1, 1, repeats, dim) @ upper(
            metric[i : i + 1]
        )
        want = (q @ rows.swapaxes(-1, -2)).max(axis=2)[0, 0]
        assert mx.allclose(
            index.promise(store, data.q[:, :, -1:])[i, 0], want, rtol=1e-3, atol=1e-3 * float(mx.abs(want).max())
        )


def test_recall_on_clustered_keys() -> None:
    """At a fifth of the tokens at least 90 % of the 32 largest scores (measured 1.0)."""
    n, data = 1200, clustered(1232)
    made = cache_of(a2ats_codebook_bits=8)
    feed(made, data.part(0, n), [n - 1, 1])
    found = []
    for t in range(n, n + 8):
        now = data.part(t, t + 1)
        made.update_and_fetch(now.k, now.v)
        chosen = index_of(made).select(made.store, now.q, 0.125)
        assert chosen is not None
        scores = (now.q.reshape(1, 2, 2, 64) @ made.store.keys.dense().swapaxes(-1, -2)).max(axis=2)
        for head in range(2):
            best = np.argsort(-np.array(scores)[0, head])[:32]
            found.append(np.isin(best, np.array(chosen)[0, head]).mean())
        made.attend(now.q, scale=0.125)
    assert np.mean(found) >= 0.9


def test_one_distance_for_all_tokens() -> None:
    """Exact keys, positions of far tokens taken to be equal: the rank correlation with true scores (measured .38)."""
    n, turn = 600, rope()
    plain_q, plain_k = normal(1, 1, 1, 64) + 1.0, normal(1, 1, n, 64, seed=1) + 0.5
    at = mx.arange(n, dtype=mx.int32)[None, None]
    true = turn(plain_q, n) @ turn.turn(plain_k, at).swapaxes(-1, -2)
    index = VectorIndex(4, 8, 0, 300, 0.2, 0.0, turn)
    far = index._far(turn(plain_q, n), mx.array([n])) @ index._plain(turn.turn(plain_k, at), 0).swapaxes(-1, -2)
    assert mx.allclose(far, turn(plain_q, 300) @ plain_k.swapaxes(-1, -2), atol=1e-3)
    ranks = [np.argsort(np.argsort(np.array(x).ravel())) for x in (true, far)]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] > 0.3


def test_storage() -> None:
    """16 + 1 bits per number of a key, 16 per value; codebook and metric 64 KiB each per head."""
    data = tensors(320, (1, 2, 128, 128), dtype=mx.float16)
    made = CompressedKVCache(KVCacheConfig(method="a2ats"), LayerInfo())
    feed(made, data, [319, 1])
    store = made.store
    assert store.row_aux["index"].nbytes * 8 == 2 * 320 * 128
    assert store.aux["books"].nbytes == store.aux["metric"].nbytes == 2 * 64 * 1024
    assert stored_bytes(made) == a2ats(8)(320, (1, 2, 128, 128), 2)
    arrays: dict[str, Any] = {"a2ats_query_h": mx.eye(128), "a2ats_codebook": normal(4096, 128)}
    config = KVCacheConfig(method="a2ats", a2ats_codebook_bits=12, a2ats_sub_dim=128, **arrays)
    paper = CompressedKVCache(config, LayerInfo())
    feed(paper, data.part(0, 80), [79, 1])
    assert paper.store.row_aux["index"].nbytes * 8 == 2 * 80 * 16  # 12 bits in whole bytes


def test_trim_drops_codes_with_rows() -> None:
    data = tensors(320)
    made, fresh = cache_of(rope()), cache_of(rope())
    feed(made, data.part(0, 300), [299, 1])
    feed(made, tensors(20, seed=5), [1] * 20)
    assert made.is_trimmable() and made.trim(20) == 20
    feed(made, data.part(300, 320), [1] * 20)
    feed(fresh, data, [299, *[1] * 21])
    assert same_state(made, fresh)
    made.trim(320)
    feed(made, data, [299, *[1] * 21])
    assert same_state(made, fresh)


def test_short_prompts_wait_for_a_fit() -> None:
    data, made = tensors(100), cache_of(rope())
    feed(made, data.part(0, 63), [62, 1])
    assert "index" not in made.store.row_aux
    feed(made, data.part(63, 64), [1])
    assert made.store.row_aux["index"].shape == (1, 2 * 4, 64) and set(made.store.aux) == {"books", "metric"}


def test_arrays_of_the_configuration() -> None:
    """Statistics alone, and with codebooks of every shape; nothing is fitted that is given."""
    data = tensors(200)
    fitted = cache_of(rope())
    feed(fitted, data, [199, 1])
    h = moments(normal(1, 2, 100, 64), 2)[0]
    books = normal(2, 8, 16, 8, seed=3)
    for query_h in (h, h[0], np.array(h)):
        made = cache_of(rope(), a2ats_query_h=query_h)
        feed(made, data, [199, 1])
        assert set(made.store.aux) == {"books"}
    for book in (books, books[0], books[:, 0], books[0, 0]):
        made = cache_of(rope(), a2ats_query_h=h, a2ats_codebook=book)
        feed(made, data, [100, 99, 1])
        assert not made.store.aux and made.store.row_aux["index"].shape[-1] == 200
        assert made.held_bytes()["fixed"] >= book.nbytes // 2 + 2 * 4 * 64 * 64  # float16
        assert not any("fitted" in note for note in made.describe()["notes"])


def test_sequences_choose_for_themselves() -> None:
    """Two sequences in one call: the codes and rows of each are those it has alone."""
    data = tensors(150, (2, 2, 64, 64))
    both = cache_of(rope(), a2ats_query_h=moments(normal(1, 2, 90, 64), 2)[0], a2ats_codebook=normal(2, 8, 16, 8))
    out = feed(both, data, [148, 1, 1])
    for i in range(2):
        one = Tensors(*(x[i : i + 1] for x in (data.q, data.k, data.v)))
        made = cache_of(rope(), a2ats_query_h=moments(normal(1, 2, 90, 64), 2)[0], a2ats_codebook=normal(2, 8, 16, 8))
        assert mx.allclose(feed(made, one, [148, 1, 1]), out[i : i + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"a2ats_b": 7},
        {"a2ats_beta": 0.0},
        {"a2ats_use_query_aware": False},
        {"a2ats_sub_dim": 16},
        {"a2ats_codebook_bits": 10},
        {"a2ats_retrieval_fraction": 0.5},
        {"a2ats_window": 80},
        {"n_calib_tokens": 100},
        {"seed": 7},
    ],
    ids=str,
)
def test_every_option_counts(fields: dict[str, Any]) -> None:
    data = tensors(201)
    plain, other = cache_of(rope()), cache_of(rope(), **fields)
    outs = [feed(c, data, [199, 1, 1]) for c in (plain, other)]
    assert not identical(*outs)


def test_without_the_queries() -> None:
    """a2ats_use_query_aware = False is beta = 1."""
    outs = [
        feed(cache_of(rope(), **f), tensors(201), [199, 1, 1])
        for f in ({"a2ats_use_query_aware": False}, {"a2ats_beta": 1.0})
    ]
    assert identical(*outs)


def test_rotations() -> None:
    """The model's own; the configuration's where there is no model; both only if they agree."""
    config = KVCacheConfig(method="a2ats", head_dim=64, a2ats_rope_base=500.0)
    alone = CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64))
    own = index_of(alone).rope
    assert own is not None and np.allclose(np.abs(own.rate), np.abs(rope(64, 500.0).rate), rtol=1e-4)
    for name, fields in {
        "a2ats_rope_base": {"a2ats_rope_base": 500.0},
        "a2ats_rope_scaling": {"a2ats_rope_scaling": {"type": "linear", "factor": 2.0}},
    }.items():
        with pytest.raises(QuantizerConfigError, match=name):
            cache_of(rope(), **fields)
    assert index_of(cache_of(rope(64, 500.0), a2ats_rope_base=500.0)).rope is rope(64, 500.0)
    assert index_of(cache_of(None)).rope is None  # a layer of a model, without positions
    with pytest.raises(QuantizerConfigError, match="a2ats_rope_scaling"):
        KVCacheFactory.create(KVCacheConfig(method="a2ats", a2ats_rope_scaling={"type": "nonsense"}))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"a2ats_codebook": mx.zeros((16, 8))}, "a2ats_query_h"),
        ({"a2ats_query_h": mx.zeros((64, 32))}, "a2ats_query_h"),
        ({"a2ats_query_h": mx.eye(64) * mx.nan}, "a2ats_query_h"),
        ({"a2ats_query_h": mx.eye(64), "a2ats_codebook": mx.zeros((32, 8))}, "a2ats_codebook_bits"),
        ({"a2ats_query_h": mx.eye(64), "a2ats_codebook": mx.zeros((16, 4))}, "a2ats_sub_dim"),
        ({"a2ats_query_h": mx.eye(64), "a2ats_codebook": mx.zeros((3, 5, 16, 8))}, "a2ats_codebook of shape"),
        ({"a2ats_query_h": mx.eye(32)}, "a2ats_query_h of shape"),
        ({"a2ats_sub_dim": 7}, "a2ats_sub_dim"),
    ],
)
def test_refusals(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(QuantizerConfigError, match=told):
        KVCacheFactory.create(KVCacheConfig(method="a2ats", head_dim=64, **SMALL | fields))


def test_artifact(tmp_path: Path) -> None:
    """``veloxquant calibrate``: saved, loaded, used from the first token on; other settings are refused."""
    model = tiny.build("llama")
    sequences: Any = tiny.tokens(300).tolist()
    made, told = fit_artifact(model, sequences, "a2ats")
    assert any("give a longer text" in line for line in told)
    made.save(tmp_path / "a2ats.safetensors")
    config = KVCacheConfig(method="a2ats", store=CalibrationArtifact.load(tmp_path / "a2ats.safetensors"))
    caches = KVCacheBuilder.for_model(model, config)
    model(tiny.tokens(30), cache=caches)
    assert all(c.store.row_aux["index"].shape[-1] == 30 and not c.store.aux for c in caches)
    for fields in ({"a2ats_beta": 0.1}, {"a2ats_codebook_bits": 4}):
        with pytest.raises(QuantizerConfigError):
            KVCacheBuilder.for_model(model, replace(config, **fields))


def test_with_a_method_that_packs() -> None:
    """[a2ats, kivi]: keys and values shrink, and what is not chosen is shut out."""
    config, packing = (KVCacheConfig(method=m, head_dim=64) for m in ("a2ats", "kivi"))
    data = tensors(400)
    made = CompressedKVCache(config, LayerInfo(head_dim=64, value_dim=64), packing)
    feed(made, data, [398, 1, 1])
    assert made.store.sealed and Way.SHUT.value in made.describe()["attention"]
    assert made.store.row_aux["index"].shape[-1] == 400
