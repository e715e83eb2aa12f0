"""SqueezeAttention: clusters and budgets of its specification, cosines of real blocks, H2O inside a layer."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from tests.matrix import feed, same_state, tensors
from tests.models import tiny
from tests.models.running import decode, greedy, lively, prefill
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.coordinators import residual
from veloxquant_mlx.policies.budgets import squeezed, three_means

COSINES = [0.80, 0.84, 0.86, 0.91, 0.93, 0.95, 0.985, 0.99]
BUDGET = 40
MODELS = {"llama": 6, "qwen3": 5, "gemma3_text": 8, "gemma4_text": 10}


# ------------------------------------------------------------------------------------------------- clusters and budgets


def test_golden_budgets() -> None:
    assert three_means(COSINES) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert squeezed(COSINES, 512, int(0.35 * 512)) == [623] * 6 + [179] * 2
    assert squeezed(COSINES, 512, int(0.30 * 512)) == [632] * 4 + [631] * 2 + [153] * 2


def test_the_rest_goes_to_the_lowest_cosines() -> None:
    shuffled = [5, 0, 7, 2, 4, 1, 6, 3]
    budgets = squeezed([COSINES[i] for i in shuffled], 512, 153)
    assert budgets == [631, 632, 153, 632, 631, 632, 153, 632]


@pytest.mark.parametrize("n", [3, 4, 7, 12])
@pytest.mark.parametrize("seed", range(5))
def test_three_means_are_exact(n: int, seed: int) -> None:
    values = np.random.default_rng(seed).uniform(0.3, 1, n)

    def cost(clusters: Any) -> float:
        return sum(((part - part.mean()) ** 2).sum() for c in range(3) if len(part := values[np.array(clusters) == c]))

    ordered = np.argsort(values)
    splits = itertools.combinations(range(1, n), 2)
    best = min(cost([sum(np.flatnonzero(ordered == i)[0] >= s for s in split) for i in range(n)]) for split in splits)
    found = three_means(values.tolist())
    assert np.isclose(cost(found), best, rtol=1e-9, atol=1e-15) and len(set(found)) == 3


def test_layers_that_are_alike_are_treated_alike() -> None:
    for cosines in ([0.5, 0.9], [0.9] * 6, [0.9, 0.9 + 1e-7, 0.9]):
        assert squeezed(cosines, 100, 35) == [100] * len(cosines)
    assert squeezed([0.8, 0.95, 0.95, 0.8], 100, 35) == [165, 35, 35, 165]
    assert three_means([0.9, 0.5, 0.9, 0.7]) == [2, 0, 2, 1]


# -------------------------------------------------------------------------------------------------- inside one layer


def bare(**fields: Any) -> CompressedKVCache:
    return CompressedKVCache(KVCacheConfig(head_dim=64, **fields))


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_cache_by_itself_is_h2o(sinks: int) -> None:
    """Also with strength 0 in a model: see test_strength_0_is_h2o."""
    own = bare(method="squeeze", squeeze_budget=BUDGET, squeeze_n_sink=sinks)
    h2o = bare(method="h2o", h2o_budget=BUDGET, h2o_n_sink=sinks, h2o_grace=(BUDGET - sinks) // 2, h2o_decay=1.0)
    data = tensors(150)
    one, other = (feed(cache, data, [80, 19, *[1] * 31, 10, *[1] * 10]) for cache in (own, h2o))
    assert mx.array_equal(one, other) and same_state(own, h2o) and own._store.live == BUDGET
    assert "fewer than three layers" in own.describe()["notes"][0]


def test_a_given_budget_needs_no_other_layers() -> None:
    cache = bare(method="squeeze", squeeze_budget=BUDGET, squeeze_resolved_budget=30)
    feed(cache, tensors(100), [99, 1])
    assert cache._store.live == 30 and cache.coordinator is None and not cache.describe()["notes"]
    assert (np.array(cache.positions)[..., -13:] == np.arange(87, 100)).all()  # (30 - 4) // 2 of the newest
    with pytest.raises(QuantizerConfigError, match="squeeze_resolved_budget=5"):
        KVCacheBuilder.for_model(tiny.build("llama"), KVCacheConfig(method="squeeze", squeeze_resolved_budget=5))


# ------------------------------------------------------------------------------------------------------ in real models


def caches_of(model: Any, **fields: Any) -> list[Any]:
    return KVCacheBuilder.for_model(model, KVCacheConfig(**{"method": "squeeze", "squeeze_budget": BUDGET} | fields))


def ours(caches: list[Any]) -> list[CompressedKVCache]:
    return [cache for cache in caches if isinstance(cache, CompressedKVCache)]


def rows(caches: list[Any]) -> list[int]:
    for cache in ours(caches):
        cache.settle()  # layers that share rows drop none before the next call
    return [cache.store.live for cache in ours(caches)]


def build(name: str) -> Any:
    changes: dict[str, Any] = {"num_hidden_layers": MODELS[name]}
    if name == "gemma4_text":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * (MODELS[name] // 2)
    return tiny.build(name, **changes)


def block_cosines(model: Any, ids: mx.array) -> list[float]:
    """Mean over tokens of the cosine between what enters each block and what the MLP's branch starts from."""
    text, found = model.model, []
    h = text.embed_tokens(ids)
    if "gemma" in type(model).__module__:
        h = h * h.shape[-1] ** 0.5
    mask = create_attention_mask(h, None, return_array=True)
    for layer in text.layers:
        window = layer.self_attn
        seen = mask
        if getattr(window, "is_sliding", False):
            seen = create_attention_mask(h, None, return_array=True, window_size=text.window_size)
        r = layer.self_attn(layer.input_layernorm(h), seen, None)
        if hasattr(layer, "pre_feedforward_layernorm"):
            r = layer.post_attention_layernorm(r)
        x, y = np.array(h[0], np.float64), np.array((h + r)[0], np.float64)
        cosine = (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)
        found.append(float(cosine.mean()))
        h = layer(h, seen, None)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_cosines_and_budgets(name: str) -> None:
    """All tokens but the last of the prompt count, in full-attention layers alone; float32 sums of 64 products."""
    model = build(name)
    ids, caches = tiny.tokens(150), caches_of(model)
    model(ids[:, :100], cache=caches)
    model(ids[:, 100:149], cache=caches)
    notes = [np.array(cache.store.aux[residual.COSINES]) for cache in ours(caches)]
    want = block_cosines(model, ids[:, :149])
    want = [c for c, cache in zip(want, caches, strict=True) if isinstance(cache, CompressedKVCache)]
    assert np.allclose([(before + newest) / count for before, newest, count in notes], want, atol=1e-5)
    assert all(count == 149 and abs(newest) <= 1 + 1e-6 for _, newest, count in notes)
    model(ids[:, 149:], cache=caches)
    smallest = int((1 - (1 - 0.35)) * BUDGET)
    assert rows(caches) == squeezed(want, BUDGET, smallest) and sum(rows(caches)) == BUDGET * len(ours(caches))
    assert len(set(rows(caches))) > 1
    assert not any(residual.COSINES in cache.store.aux for cache in ours(caches))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_do_not_matter(name: str) -> None:
    model, found = build(name), []
    ids = tiny.tokens(120)
    for step in (7, 64, 119):
        caches = caches_of(model)
        prefill(model, caches, ids, step)
        found.append(caches)
    whole = caches_of(model)
    mx.eval(model(ids, cache=whole))  # the last token's cosine is known here, and left out like elsewhere
    for cache in ours(whole):
        cache.end_prefill()
    assert len(set(map(tuple, (rows(caches) for caches in (*found, whole))))) == 1 and len(set(rows(whole))) > 1
    for caches in found:
        for a, b in zip(ours(caches), ours(whole), strict=True):
            assert mx.array_equal(mx.sort(a.positions, axis=-1), mx.sort(b.positions, axis=-1))


def test_strength_0_is_h2o() -> None:
    """Bit for bit, the model's answers included."""
    model, ids, results = build("llama"), tiny.tokens(120)[0], []
    sinks = 4
    for fields in (
        {"method": "squeeze", "squeeze_budget": BUDGET, "squeeze_strength": 0.0},
        {"method": "h2o", "h2o_budget": BUDGET, "h2o_grace": (BUDGET - sinks) // 2, "h2o_decay": 1.0},
    ):
        caches = KVCacheBuilder.for_model(model, KVCacheConfig(**fields))
        results.append((caches, greedy(model, ids, 20, prompt_cache=caches, prefill_step_size=50, sampler=lively)))
    (own, (tokens, logprobs)), (h2o, (want, expected)) = results
    assert tokens == want and np.array_equal(logprobs, expected)
    assert all(same_state(a, b) for a, b in zip(own, h2o, strict=True))


def test_budgets_stay_for_later_turns() -> None:
    model, ids = build("llama"), tiny.tokens(300)
    caches = caches_of(model)
    prefill(model, caches, ids[:, :100], 64)
    first = rows(caches)
    decode(model, caches, ids[:, 100:110])
    prefill(model, caches, ids[:, 110:300], 64)
    assert rows(caches) == first and len(set(first)) > 1
    for cache, budget in zip(caches, first, strict=True):
        assert cache.life.budget == budget and f"{budget} tokens of {BUDGET}" in cache.describe()["notes"][-1]
        newest = max(1, (budget - 4) // 2)
        assert (np.sort(np.array(cache.positions))[..., -newest:] == np.arange(300 - newest, 300)).all()


def test_prompts_of_one_token_share_evenly() -> None:
    model, ids = build("llama"), tiny.tokens(100)
    caches = caches_of(model)
    decode(model, caches, ids)
    assert rows(caches) == [BUDGET] * 6


def test_a_first_call_of_one_token_counts() -> None:
    model, ids, found = build("llama"), tiny.tokens(100), []
    for chunks in ((1, 98, 1), (99, 1)):
        caches, at = caches_of(model), 0
        for n in chunks:
            mx.eval(model(ids[:, at : at + n], cache=caches))
            at += n
        found.append(rows(caches))
    assert found[0] == found[1]


@pytest.mark.parametrize("when", ["in the prompt", "after it"])
def test_copies_and_files_go_on_alike(when: str, tmp_path: Path) -> None:
    """The notes of half a prompt and settled budgets travel with the caches."""
    model, ids = build("qwen3"), tiny.tokens(140)
    caches = caches_of(model)
    model(ids[:, :60], cache=caches)
    if when == "after it":
        model(ids[:, 60:61], cache=caches)
    mx.eval([c.state for c in caches])
    copies = copy.deepcopy(caches)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, caches)
    loaded: Any = load_prompt_cache(file)
    start = ids.shape[1] - 79 if when == "after it" else 60
    outs = []
    some: Any
    for some in (caches, copies, loaded):
        outs.append(prefill(model, some, ids[:, start:120], 30))
        outs[-1] = decode(model, some, ids[:, 120:])
    assert rows(caches) == rows(copies) == rows(loaded) and len(set(rows(caches))) > 1
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])


def test_capacity_caps_every_layer() -> None:
    model, ids = build("llama"), tiny.tokens(120)
    caches = caches_of(model, capacity=BUDGET)
    prefill(model, caches, ids, 30)
    assert max(rows(caches)) == BUDGET and min(rows(caches)) == 14


# ------------------------------------------------------------------------------------------- models that can be watched


class Odd(nn.Module):
    """A block that scales what its attention adds."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.self_attn, self.input_layernorm, self.mlp = block.self_attn, block.input_layernorm, block.mlp
        self.use_sliding = False

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        h = x + 0.5 * self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(h)


def test_models_that_hide_their_residual_stream_are_refused() -> None:
    with pytest.raises(QuantizerConfigError, match=r"needs the residual stream.*Gemma3nDecoderLayer"):
        caches_of(tiny.build("gemma3n"))
    model = tiny.build("llama")
    model.model.layers = [Odd(block) for block in model.model.layers]
    with pytest.raises(QuantizerConfigError, match=r"needs the residual stream.*does more than add"):
        caches_of(model)
    with pytest.raises(QuantizerConfigError, match="needs the model's queries"):
        caches_of(tiny.build("gemma2"))
    assert rows(caches_of(tiny.build("gemma3n"), squeeze_resolved_budget=30)) == [0, 0]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_nothing_else_is_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run as they are for other caches, for settled budgets and for models of the same class."""
    model, ids = build(name), tiny.tokens(14)
    stock = make_prompt_cache(model)
    before = prefill(model, stock, ids[:, :10], 6)
    caches = caches_of(model)
    assert np.array_equal(prefill(model, caches, ids[:, :10], 6), before)  # listened to, below every budget
    monkeypatch.setattr(residual, "_heard", None)
    assert np.array_equal(decode(model, caches, ids[:, 10:14]), decode(model, stock, ids[:, 10:14]))
    assert np.array_equal(prefill(model, make_prompt_cache(model), ids[:, :10], 6), before)
    other = build(name)
    assert np.array_equal(prefill(other, make_prompt_cache(other), ids[:, :10], 6), before)
    resolved = caches_of(other, squeeze_resolved_budget=40)
    assert np.array_equal(prefill(other, resolved, ids[:, :10], 6), before)
