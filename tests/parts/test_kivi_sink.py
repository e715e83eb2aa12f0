"""KVSink over KIVI: which tokens are sinks, and that they stay exact in all layers, whatever happens to the cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.matrix import Tensors, identical, same_state, split, tensors
from tests.models import tiny
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, load_cache, save_cache
from veloxquant_mlx.artifacts.stores import InMemoryArtifactStore
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.coordinators import sinks
from veloxquant_mlx.coordinators.sinks import Emergence
from veloxquant_mlx.core.types import LayerInfo

FOUND = Emergence(block=0, channels=(7,), threshold=500.0)
SMALL: dict[str, Any] = {"method": "kivi_sink", "residual_length": 32, "n_sink_tokens": 3}
AT = (14, 40, 99, 130)  # more than the three places that the caches here have


def make(packing: KVCacheConfig | None = None, dim: int = 64, **fields: Any) -> CompressedKVCache:
    layer = LayerInfo(head_dim=dim, value_dim=dim, emergence=FOUND)
    config = KVCacheConfig(**SMALL | fields)
    return CompressedKVCache(config, layer, packing)


def feed(cache: CompressedKVCache, data: Tensors, chunks: list[int], at: tuple[int, ...] = AT) -> mx.array:
    """Run tokens through the cache; those at positions ``at`` are sinks. The outputs."""
    outs = []
    for n in chunks:
        start = cache.offset
        now = data.part(start, start + n)
        found = mx.array([[start + i in at for i in range(n)]])
        marks = sinks.mark(cache.store.protected, cache.protected, found, start)
        cache.store.protected = marks
        cache.update_and_fetch(now.k, now.v)
        outs.append(cache.attend(now.q, scale=0.125, mask="causal" if n > 1 else None))
        mx.eval(outs[-1], cache.state)
    return mx.concatenate(outs, axis=2)


def places(cache: CompressedKVCache) -> list[int]:
    """Where the protected tokens of one sequence are."""
    held = cache.store.protected
    return [] if held is None else np.array(held)[0, 0].tolist()


def exact(cache: CompressedKVCache, data: Tensors, position: int) -> bool:
    keys, values = cache.materialize()
    return all(identical(a[:, :, position], b[:, :, position]) for a, b in ((keys, data.k), (values, data.v)))


# ------------------------------------------------------------------------------------------------------ rows that stay


@pytest.mark.parametrize("tokens", [64, 129, 200])
@pytest.mark.parametrize("size", [1, 7, 64, 200])
def test_sinks_stay_exact_however_the_prompt_came(tokens: int, size: int) -> None:
    """The first three; the fourth has no place. Bit for bit the same arrays whatever the chunks."""
    data = tensors(tokens)
    cache, whole = make(), make()
    feed(cache, data, split(tokens, size))
    feed(whole, data, [tokens])
    assert same_state(cache, whole)
    assert all(exact(cache, data, at) for at in AT[:3] if at < tokens)
    assert not exact(cache, data, 15) and (tokens < 163 or not exact(cache, data, AT[3]))
    assert places(cache) == [*(at for at in AT if at < tokens), -2, -2][:3]


def test_attention_uses_the_exact_rows() -> None:
    data = tensors(201)
    cache = make()
    feed(cache, data, [200])
    keys, values = cache.materialize()
    last = data.part(200, 201)
    out = feed(cache, data, [1])
    k, v = mx.concatenate([keys, last.k], axis=2), mx.concatenate([values, last.v], axis=2)
    want = reference.attention(last.q, k, v, 0.125, None)
    assert mx.allclose(out, want, rtol=1e-5, atol=1e-5)  # float32 sums of 64 and 201 terms in another order
    keys, values = cache.materialize()
    many = mx.tile(last.q, (1, 1, 80, 1))  # these go block by block, over decoded rows
    want = reference.attention(many, keys, values, 0.125, None)
    assert mx.allclose(cache.attend(many, scale=0.125), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_neighbours_do_not_notice(bits: int) -> None:
    """A key 25 times as large, protected: every other row is what it is when the token repeats the one before it."""
    data = tensors(96)
    here = mx.arange(96)[:, None] == 14
    large = Tensors(data.q, mx.where(here, 25 * data.k, data.k), data.v)
    like = Tensors(data.q, mx.where(here, data.k[:, :, 13:14], data.k), data.v)
    caches = [make(bit_width_inlier=bits) for _ in range(3)]
    for cache, rows, at in zip(caches, (large, like, large), ((14,), (), ()), strict=True):
        feed(cache, rows, [96], at)
    protected, without, plain = (np.delete(np.array(cache.materialize()[0]), 14, axis=2) for cache in caches)
    assert np.array_equal(protected, without)
    error = [np.abs(k - np.delete(np.array(data.k), 14, axis=2)).mean() for k in (protected, plain)]
    assert error[1] > 2 * error[0]


def test_a_whole_group_of_sinks_is_packed_as_it_is() -> None:
    cache, data = make(n_sink_tokens=40), tensors(64)
    feed(cache, data, [64], tuple(range(34)))
    assert all(exact(cache, data, at) for at in range(34)) and not exact(cache, data, 34)


def test_no_places_is_kivi() -> None:
    data = tensors(150)
    mine, kivi = make(n_sink_tokens=0), make(method="kivi", n_sink_tokens=5)
    outs = []
    for cache in (mine, kivi):
        for start, stop in ((0, 149), (149, 150)):
            now = data.part(start, stop)
            cache.update_and_fetch(now.k, now.v)
            outs.append(cache.attend(now.q, scale=0.125, mask="causal"))
    assert same_state(mine, kivi) and identical(outs[1], outs[3]) and mine.protected == 0


def test_trim_forgets_sinks_and_brings_others_back_exact() -> None:
    data = tensors(200)
    cache = make()
    feed(cache, data, [200])
    cache.trim(125)  # into the group of row 64 on; the sink at 99 is gone
    assert exact(cache, data, 14) and exact(cache, data, 40)
    assert places(cache) == [14, 40, -2]
    again = Tensors(
        *(mx.concatenate([getattr(data, n)[:, :, :75], getattr(tensors(125, seed=9), n)], axis=2) for n in "qkv")
    )
    feed(cache, again, [125], (80,))
    assert all(exact(cache, again, at) for at in (14, 40, 80)) and not exact(cache, again, 99)
    cache.trim(200)
    assert cache.store.keys.exact.rows is None and places(cache) == [-2] * 3


def test_copies_states_and_batches_keep_them() -> None:
    data = tensors(230)
    cache = make()
    feed(cache, data, [200])
    batch = CompressedBatchCache.merge([cache, cache])
    twins = [copy.deepcopy(cache), CompressedKVCache.from_state(cache.state), batch.extract(1)]
    for twin in twins:
        assert identical(feed(twin, data, [30]), feed(copy.deepcopy(cache), data, [30]))
        assert exact(twin, data, 14) and exact(twin, data, 99) and twin.layer.emergence == FOUND
        assert "sink_rule: the first 3 tokens beyond 500" in twin.describe()["notes"][0]


def test_policies_that_drop_rows_take_them_along() -> None:
    """Heads keep different rows; a sink that a head keeps is exact there."""
    packing = KVCacheConfig(**SMALL)
    cache, data = make(packing, method="snapkv", snap_budget=128, snap_obs_window=8), tensors(220)
    feed(cache, data, [200, *[1] * 20])
    positions, (keys, values) = np.array(cache.positions)[0], cache.materialize()
    kept = 0
    for head in range(2):
        for at in AT[:3]:
            row = np.flatnonzero(positions[head] == at)
            kept += row.size
            for got, rows in ((keys, data.k), (values, data.v)):
                assert all(identical(got[0, head, int(i)], rows[0, head, at]) for i in row)
    assert kept > 0 and cache.store.keys.n_sealed > 0
    # Dropping rows once they are packed: keys come back decoded, values move as codes.
    cache.store.keep(mx.arange(10, 100)[None, None])
    keys, positions = cache.materialize()[0], np.array(cache.positions)[0]
    again = [(h, int(i), at) for h in range(2) for at in AT[:3] for i in np.flatnonzero(positions[h] == at)]
    assert all(identical(keys[0, h, i], data.k[0, h, at]) for h, i, at in again)
    assert all(identical(cache.materialize()[1][0, h, i], data.v[0, h, at]) for h, i, at in again)


def test_storage() -> None:
    """K 3.020 and V 3.426 bits per number at 4096 tokens of 128 float16 numbers and five sinks; positions: 20 bytes."""
    cache = make(dim=128, residual_length=128, n_sink_tokens=5)
    rows = mx.random.normal((1, 8, 4096, 128), key=mx.random.key(0)).astype(mx.float16)
    cache.store.protected = sinks.mark(None, 5, mx.arange(4096)[None] == 14, 0)
    cache.append(rows, rows)
    cache.settle()
    held = [sum(a.nbytes for a in s.arrays().values()) for s in (cache.store.keys, cache.store.values)]
    bits = [8 * n / rows.size for n in held]
    assert bits == [3.0 + 16 * 5 / 4096, (3968 * 3 + 128 * 16 + 16 * 5) / 4096]
    assert [round(b, 3) for b in bits] == [3.020, 3.426] and cache.held_bytes()["index"] == 20


# ---------------------------------------------------------------------------------------------------- who is a sink


def test_massive_activations() -> None:
    hidden = np.random.default_rng(0).normal(size=(20, 32)).astype(np.float32)  # its median is 0.67
    hidden[4, 7], hidden[5, 8], hidden[:, 9] = 3000.0, 300.0, 2000.0
    median, pairs = sinks.massive(hidden)
    assert pairs == {(4, 7)} and 0.6 < median < 0.8  # 300 is too small, channel 9 large for every token
    assert sinks.massive(hidden * 0.01)[1] == set()


def test_where_they_emerge() -> None:
    quiet: tuple[float, set[tuple[int, int]]] = (0.5, set())
    passing, lasting = (0.2, {(3, 1)}), (0.4, {(0, 7), (0, 2)})
    found = sinks.emerges([quiet, passing, quiet, lasting, (1.0, {(0, 7)}), (1.0, {(0, 7)}), quiet])
    assert found == Emergence(3, (7,), 400.0)
    assert sinks.emerges([quiet, passing, quiet]) == sinks.emerges([quiet]) == sinks.NONE


class Spike(nn.Module):
    """An MLP that adds 3000 to channel 7 of the tokens whose normed state shows that they are ``token``."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.mlp = mlp

    def __call__(self, x: mx.array) -> mx.array:
        return self.mlp(x) + mx.where(x[..., 3:4] > 6, 3000.0, 0.0) * (mx.arange(x.shape[-1]) == 7)


def with_sinks(name: str = "llama") -> tuple[Any, int]:
    """A model of six layers that makes a sink of one token, in block 1 (of one that the probe's text has)."""
    token = int(np.random.default_rng(0).integers(0, tiny.VOCAB, (sinks.PROBE_TOKENS,))[9])
    model = tiny.build(name, num_hidden_layers=6)
    model.model.embed_tokens.weight[:, 3] = 0.0
    model.model.embed_tokens.weight[token, 3] = 100.0
    model.model.layers[1].mlp = Spike(model.model.layers[1].mlp)
    model.model.layers[1].post_attention_layernorm.weight[3] = 1.0
    return model, token


def text(token: int, at: list[int], n: int = 120, seed: int = 0) -> mx.array:
    ids = np.array(tiny.tokens(n, seed))
    ids[ids == token] = (token + 1) % tiny.VOCAB
    ids[0, at] = token
    return mx.array(ids)


def caches_of(model: Any, **fields: Any) -> Any:
    config = KVCacheConfig(**SMALL | fields)
    return KVCacheBuilder.for_model(model, config)


def run(model: Any, caches: Any, ids: mx.array, size: int) -> None:
    for start in range(0, ids.shape[1], size):
        mx.eval(model(ids[:, start : start + size], cache=caches), [c.state for c in caches])


@pytest.mark.parametrize("size", [120, 13, 1])
def test_a_planted_sink_is_protected_in_all_later_layers(size: int) -> None:
    model, token = with_sinks()
    caches, plain = caches_of(model), make_prompt_cache(model)
    assert [cache.protected for cache in caches] == [0, 0, 3, 3, 3, 3]
    notes = [cache.describe()["notes"][-1] for cache in caches]
    assert notes[1] == "sink_rule: the first 3 positions (sinks appear after block 1 only)"
    assert notes[2].startswith("sink_rule: the first 3 tokens beyond") and "channels [7] after block 1" in notes[2]
    ids = text(token, [14, 77])
    run(model, caches, ids, size)
    assert all(places(cache) == [14, 77, -2] for cache in caches[2:])
    fresh = caches_of(model, residual_length=128)  # nothing is packed: the rows that came
    run(model, fresh, ids, 120)
    for cache, want in zip(caches[2:3], fresh[2:3], strict=True):
        assert cache.store.keys.n_sealed == 96
        got = cache.materialize()
        if size == 120:  # chunks see packed rows of the layers before
            for a, b in zip(got, want.materialize(), strict=True):
                assert identical(a[:, :, 14], b[:, :, 14]) and identical(a[:, :, 77], b[:, :, 77])
    assert all(cache.store.protected is None for cache in caches[:2]) and plain[0].empty()


def test_sequences_of_a_batch_have_their_own() -> None:
    model, token = with_sinks()
    one, other = text(token, [14, 30], 60), text(token, [5], 47, seed=1)
    batches = [CompressedBatchCache.merge([a, b]) for a, b in zip(caches_of(model), caches_of(model), strict=True)]
    for batch in batches:
        batch.prepare(left_padding=[0, 13])
    padded = mx.concatenate([one, mx.concatenate([mx.full((1, 13), token), other], axis=1)])
    mx.eval(model(padded, cache=batches))
    mx.eval(model(mx.array([[token], [3]]), cache=batches))
    for batch in batches[2:]:
        assert [places(row) for row in batch.rows] == [[14, 30, 60], [5, -2, -2]]


@pytest.mark.parametrize("first", ["squeeze", "kivi_sink"])
def test_blocks_may_be_watched_for_two_reasons(first: str) -> None:
    """Budgets by layer and sinks, whichever was asked for first."""
    model, token = with_sinks()
    dropping = KVCacheConfig(method="squeeze", squeeze_budget=80)
    if first == "kivi_sink":
        caches_of(model)
    caches = KVCacheBuilder.for_model(model, [dropping, KVCacheConfig(**SMALL)])
    run(model, caches, text(token, [14, 77]), 119)
    assert [places(cache) for cache in caches] == [[], [], *[[14, 77, -2]] * 4]
    budgets = [cache.life.budget for cache in caches]
    assert sum(budgets) == 6 * 80 and len(set(budgets)) > 1


def test_files_bring_the_rule_along(tmp_path: Path) -> None:
    """Also to a process whose model was never made ready."""
    model, token = with_sinks()
    caches, ids = caches_of(model), text(token, [14, 90])
    run(model, caches, ids[:, :80], 80)
    save_cache(tmp_path / "cache", caches)
    other, _ = with_sinks()
    loaded = load_cache(tmp_path / "cache", other)
    run(other, loaded, ids[:, 80:], 40)
    run(model, caches, ids[:, 80:], 40)
    assert [places(c) for c in loaded] == [[], [], *[[14, 90, -2]] * 4]
    assert all(same_state(a, b) for a, b in zip(loaded, caches, strict=True))


def test_the_probe_runs_once_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryArtifactStore()
    model, _ = with_sinks()
    first = caches_of(model, store=store)[3].layer.emergence
    assert first == Emergence(1, (7,), first.threshold)
    monkeypatch.setattr(sinks, "_probe", None)
    assert caches_of(model)[3].layer.emergence == first  # the same object
    again, _ = with_sinks()
    told = caches_of(again, store=store)[3].layer.emergence  # the same weights, from the store
    assert (told.block, told.channels) == (first.block, first.channels)
    assert told.threshold == pytest.approx(first.threshold, rel=1e-6)  # float32 there


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "nanbeige"])
def test_models_without_them_keep_the_first_tokens(name: str) -> None:
    model = tiny.build(name)
    caches = [c for c in caches_of(model) if isinstance(c, CompressedKVCache)]
    why = "this model runs its layers more than once" if name == "nanbeige" else sinks.NONE
    for cache in caches:
        assert cache.describe()["notes"][-1] == f"sink_rule: the first 3 positions ({why})" and not cache.protected
    assert "no model is at hand" in CompressedKVCache(KVCacheConfig(method="kivi_sink")).describe()["notes"][-1]


def test_a_model_that_cannot_be_probed_is_told_of() -> None:
    model = tiny.build("llama")
    model.model.norm = None
    assert "it could not be probed: TypeError" in caches_of(model)[0].describe()["notes"][-1]
