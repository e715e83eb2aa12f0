"""Models whose key projections have large biases (Qwen2 and its kind) keep their answers at few bits."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.matrix import feed, identical, tensors
from tests.models import tiny
from tests.models.running import prefill
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.models.bias import NOTE, KeyBias
from veloxquant_mlx.models.inspect import cache_slots
from veloxquant_mlx.models.rope import probe_rotation

# Keys after rotation in tokens' groups, rows of a codebook, keys before rotation.
CONFIGS = {
    "kivi": KVCacheConfig(method="kivi", bit_width_inlier=4, residual_length=32),
    "turboquant_rvq": KVCacheConfig(method="turboquant_rvq", bit_width_inlier=2),
    "skvq": KVCacheConfig(method="skvq", skvq_bits_key=4, skvq_bits_value=4, skvq_window=32),
}


def biased(scale: float) -> Any:
    """A tiny Qwen2 whose keys' biases are ``scale`` in random directions."""
    model = tiny.build("qwen2")
    for i, layer in enumerate(model.layers):
        projection = layer.self_attn.k_proj
        projection.bias = scale * mx.sign(mx.random.normal(projection.bias.shape, key=mx.random.key(i)))
    return model


def divergence(model: Any, config: KVCacheConfig, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """Mean KL of the logits over packed history against the model's own cache."""
    ids = mx.array(np.random.default_rng(1).integers(0, 60, (1, 160)))
    want = prefill(model, make_prompt_cache(model), ids, 40)
    with monkeypatch.context() as patch:
        if not guarded:
            patch.setattr(KeyBias, "taken_out", lambda self, recipe: recipe)
        caches = KVCacheBuilder.for_model(model, config)
    assert guarded == any(NOTE in layer.notes for layer in cache_report(caches).layers)
    got = prefill(model, caches, ids, 40)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (want, got))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", CONFIGS)
def test_guard_saves_the_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = biased(60.0)
    plain, guarded = (divergence(model, CONFIGS[name], flag, monkeypatch) for flag in (False, True))
    print(name, plain, guarded)
    assert guarded < plain / 5


def test_small_biases_are_left_alone() -> None:
    assert all(slot.layer is not None and slot.layer.key_bias is None for slot in cache_slots(biased(0.001)))


def test_bias_is_read_off_the_layer() -> None:
    model = biased(30.0)
    for slot in cache_slots(model):
        layer: Any = model.layers[slot.index]
        assert slot.layer is not None and slot.layer.key_bias is not None
        want = np.array(layer.self_attn.k_proj.bias).reshape(slot.layer.key_bias.vector.shape)
        assert np.array_equal(slot.layer.key_bias.vector, want)
    # A norm after the projection makes the keys no sum of a constant and the rest.
    assert all(slot.layer is None or slot.layer.key_bias is None for slot in cache_slots(tiny.build("qwen3")))


@pytest.mark.parametrize("rope", [nn.RoPE(64), nn.RoPE(32, traditional=True), None], ids=["half", "partial", "none"])
def test_scores_are_those_of_the_rows(rope: nn.RoPE | None) -> None:
    bias = KeyBias(np.random.default_rng(0).normal(size=(2, 64)), None if rope is None else probe_rotation(rope, 64))
    q, positions = mx.random.normal((1, 2, 6, 64)), mx.array([[[0, 1, 5, 700, 100_000]]], mx.int32)
    rows = mx.broadcast_to(bias.rows(positions), (1, 2, 5, 64))
    # float32 sums of 64 products of numbers of size one, in another order
    assert mx.allclose(mx.broadcast_to(bias.scores(q, positions), (1, 2, 6, 5)), q @ rows.swapaxes(-1, -2), atol=1e-4)
    if rope is not None:  # what the layer itself makes of a constant key
        constant = mx.broadcast_to(mx.array(bias.vector.astype(np.float32))[None, :, None], (1, 2, 1, 64))
        assert mx.allclose(bias.rows(mx.array([[[700]]])), rope(constant, offset=700), atol=1e-3)  # fp32 angles


@pytest.mark.parametrize("method", ["kivi", "skvq"])
def test_state_and_copies_keep_it(method: str) -> None:
    rope = probe_rotation(nn.RoPE(64), 64)
    bias = KeyBias(np.full((2, 64), 40.0), rope)
    layer = LayerInfo(head_dim=64, value_dim=64, kv_heads=2, rope=rope, key_bias=bias)
    cache = CompressedKVCache(dataclasses.replace(CONFIGS[method], head_dim=64), layer)
    data = tensors(300)
    feed(cache, data.part(0, 299), [250, 49])
    twins = [copy.deepcopy(cache), CompressedKVCache.from_state(cache.state)]
    outs = []
    for twin in (cache, *twins):
        outs.append(feed(twin, data.part(299, 300), [1]))
    assert all(identical(out, outs[0]) for out in outs[1:])
    assert cache.describe()["notes"][-1] == NOTE
