"""Every method that drops tokens with every method that packs them, on a tiny model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.matrix import feed, tensors
from tests.models import tiny
from tests.models.running import decode, prefill
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError, cache_report, load_cache, save_cache
from veloxquant_mlx.attention import masks, reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.registry import METHODS, method
from veloxquant_mlx.core.types import LayerInfo, Recipe

BUDGET, PROMPT, STEPS = 96, 150, 30
# What lets a method pack within so few rows.
SMALL: dict[str, dict[str, Any]] = {
    "kivi": {"residual_length": 32},
    "kivi_sink": {"residual_length": 32},
    "adakv": {"residual_length": 32},
    "kitty": {"residual_length": 32},
    "skvq": {"skvq_window": 16},
    "nsnquant": {"nsn_residual_length": 32},
    "qjl": {"residual_length": 32},
    "vecinfer": {"key_codebook_bits": 8, "key_sub_dim": 8, "residual_length": 32},
    "kvquant": {"n_calib_tokens": 64},
    "kvtc": {"residual_length": 32},
    "streaming_llm": {"stream_window_size": BUDGET - 4},
    "rocketkv": {"rocketkv_compression_ratio": 2.0, "rocketkv_obs_window": 8},
    "snapkv": {"snap_obs_window": 8},
    "kvzip": {"kvzip_probe": "latest"},
    "qfilters": {"qfilters_on_low_retention": "ignore"},
}
# Two layers are few: they are a group.
START: dict[str, dict[str, Any]] = {"minicache": {"minicache_start_frac": 0.0}}


def config_of(name: str) -> KVCacheConfig:
    """A configuration whose budget, where it has one, is ``BUDGET``."""
    options = method(name).info.options
    budgets = [f.name for f in dataclasses.fields(options) if f.name.endswith("_budget")] if options else []
    fields = {b: BUDGET for b in budgets if not b.endswith("resolved_budget")}
    return KVCacheConfig(**{"method": name, "head_dim": 32, **fields, **SMALL.get(name, {})})


def recipe(name: str) -> Recipe:
    """What the method makes of a layer that may be packed together with another."""
    return method(name).recipe(config_of(name), LayerInfo(head_dim=32, value_dim=32, kv_heads=2, members=2))


DROPPING = [name for name in METHODS if recipe(name).eviction is not None]
JOINT = [name for name in METHODS if recipe(name).together > 1]
PACKING = [name for name in METHODS if name not in DROPPING and name not in JOINT]


@functools.cache
def model() -> Any:
    return tiny.build("llama")


@functools.cache
def alone(name: str) -> tuple[list[Any], np.ndarray]:
    """Caches of the dropping method by itself after the prompt, and the prompt's logits."""
    caches = KVCacheBuilder.for_model(model(), config_of(name))
    return caches, prefill(model(), caches, tiny.tokens(PROMPT), 50)


@pytest.mark.parametrize("packing", JOINT)
def test_layers_that_are_packed_together_must_hold_the_same_tokens(packing: str) -> None:
    pair = [config_of("snapkv"), dataclasses.replace(config_of(packing), **START.get(packing, {}))]
    with pytest.raises(QuantizerConfigError, match="packs several layers together"):
        KVCacheBuilder.for_model(model(), pair)


@pytest.mark.parametrize("packing", PACKING)
@pytest.mark.parametrize("dropping", DROPPING)
def test_pair(dropping: str, packing: str) -> None:
    """The same rows stay, they are packed, and decoding goes on at the same number of rows."""
    single, logits = alone(dropping)
    both = KVCacheBuilder.for_model(model(), [config_of(dropping), config_of(packing)], serve_standalone=True)
    got = prefill(model(), both, tiny.tokens(PROMPT), 50)
    if dropping != "streaming_llm":  # packs between the chunks of a prompt
        assert np.array_equal(got, logits)
        assert all(mx.array_equal(a.positions, b.positions) for a, b in zip(both, single, strict=True))
    report, plain = cache_report(both), cache_report(single)
    assert all(layer.packed for layer in report.layers)
    assert sum(layer.nbytes - layer.fixed for layer in report.layers) < plain.nbytes
    decode(model(), both, tiny.tokens(STEPS, seed=1))
    single = copy.deepcopy(single)
    decode(model(), single, tiny.tokens(STEPS, seed=1))
    assert [layer.rows for layer in cache_report(both).layers] == [layer.rows for layer in cache_report(single).layers]
    for cache in both:
        positions = np.array(cache.positions)
        assert all((np.diff(head[head >= 0]) > 0).all() and head.max() == PROMPT + STEPS - 1 for head in positions[0])


# Where rows are sealed, dropped and cleared away at awkward moments.
EDGES = {
    "one row short of a block": (KVCacheConfig(method="h2o", h2o_budget=127), KVCacheConfig(method="kivi"), 200),
    "queries of the newest rows only": (
        KVCacheConfig(method="h2o", h2o_budget=64),
        KVCacheConfig(method="adakv", adakv_importance="attention_entropy"),
        80,
    ),
    "probes across clearings": (KVCacheConfig(method="tova", tova_budget=256), KVCacheConfig(method="zipcache"), 300),
    "queries for ranks": (
        KVCacheConfig(method="snapkv", snap_budget=128),
        KVCacheConfig(method="amc", amc_use_query_saliency=True),
        40,
    ),
    "indices share no marks": (
        KVCacheConfig(method="a2ats"),
        KVCacheConfig(method="adakv", adakv_importance="attention_entropy", residual_length=32),
        40,
    ),
}


@pytest.mark.parametrize("case", EDGES)
def test_awkward_moments(case: str) -> None:
    """Many steps of one layer: attention stays that of the rows that can be looked at."""
    dropping, packing, steps = EDGES[case]
    data, n = tensors(300 + steps), 300
    layer = LayerInfo(head_dim=64, value_dim=64, kv_heads=2)
    cache = CompressedKVCache(dropping, layer, packing)
    feed(cache, data.part(0, n), [n - 1, 1])
    for i in range(n, n + steps):
        now = data.part(i, i + 1)
        cache.update_and_fetch(now.k, now.v)
        keys, values = cache._store.keys.dense(dtype=mx.float32), cache._store.values.dense(dtype=mx.float32)
        mask = masks.without_holes(None, cache._store, 1, 4)
        want = reference.attention(now.q, keys, values, 0.125, mask)
        out = cache.attend(now.q, scale=0.125)
        if dropping.method != "a2ats":  # it reads some of the rows
            assert mx.allclose(out, want, rtol=1e-4, atol=1e-4)  # float32 sums in another order
        mx.eval(out, cache.state)
    assert cache.offset == n + steps and int(cache.positions.max()) == n + steps - 1


PAIR = [config_of("snapkv"), KVCacheConfig(method="turboquant_rvq", head_dim=32)]


def test_files_copies_and_batches(tmp_path: Any) -> None:
    """A pair is saved, copied and batched like any cache, both configurations with it."""
    caches = KVCacheBuilder.for_model(model(), PAIR)
    prefill(model(), caches, tiny.tokens(PROMPT), 50)
    save_cache(tmp_path / "pair.safetensors", caches)
    loaded = load_cache(tmp_path / "pair.safetensors", model())
    assert all(cache.method == "snapkv+turboquant_rvq" and cache.packing.method == "turboquant_rvq" for cache in loaded)
    merged = [CompressedKVCache.merge([a, b]) for a, b in zip(caches, copy.deepcopy(caches), strict=True)]
    assert sum(cache.nbytes for cache in merged) == 2 * sum(cache.nbytes for cache in caches)
    ids = tiny.tokens(5, seed=1)
    want = decode(model(), caches, ids)
    assert np.array_equal(decode(model(), loaded, ids), want)
    both = np.array(model()(mx.concatenate([ids[:, :1]] * 2), cache=merged))
    assert np.allclose(both, np.broadcast_to(want[:1], both.shape), atol=1e-5)  # float32, another batch size


def test_bytes_multiply() -> None:
    """Half of the tokens at about a quarter of the size, indices apart."""
    ids = tiny.tokens(192)
    held = {}
    for name, config in {"drops": PAIR[:1], "packs": PAIR[1:], "both": PAIR}.items():
        caches = KVCacheBuilder.for_model(model(), config)
        prefill(model(), caches, ids, 64)
        held[name] = sum(n for c in caches for kind, n in c.held_bytes().items() if kind in ("packed", "window"))
    whole = 2 * 2 * 192 * 32 * 4 * len(model().layers)
    assert held["drops"] * 192 <= whole * 128  # 96 rows, with room to grow to 128
    assert held["both"] / whole == pytest.approx(held["packs"] / whole * 128 / 192, rel=0.01)
