"""Every method that drops tokens, on whole models: the same tokens stay however the prompt came, as they were."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.models import tiny
from tests.models.running import decode, prefill
from tests.models.test_composition import BUDGET, DROPPING, config_of
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig
from veloxquant_mlx.cache.layer import CompressedKVCache

PROMPT = 150
# These pack or drop between the chunks of a prompt, or read less than they hold once it has ended.
BOUNDED = ("streaming_llm",)


def ours(caches: list[Any]) -> list[CompressedKVCache]:
    return [cache for cache in caches if isinstance(cache, CompressedKVCache)]


def fed(model: Any, config: KVCacheConfig, ids: mx.array, step: int) -> list[CompressedKVCache]:
    """Caches after the prompt in steps of ``step`` and its last token alone; 0: the prompt in one call."""
    caches = KVCacheBuilder.for_model(model, config)
    if step:
        prefill(model, caches, ids, step)
    else:
        mx.eval(model(ids, cache=caches))
        for cache in ours(caches):
            cache.end_prefill()
    return ours(caches)


def same_kept(a: list[CompressedKVCache], b: list[CompressedKVCache]) -> float:
    """The share of kept positions that two runs have in common."""
    common = total = 0
    for x, y in zip(a, b, strict=True):
        p, q = (
            np.array(mx.broadcast_to(c.positions, (1, c.layer.kv_heads or 1, c.positions.shape[-1])))[0] for c in (x, y)
        )
        for one, other in zip(p, q, strict=True):
            common += len(set(one.tolist()) & set(other.tolist()) - {-1})
            total += max(int((one >= 0).sum()), int((other >= 0).sum()))
    return common / total


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("name", DROPPING)
def test_kept_rows_are_the_models_own(name: str, kind: str) -> None:
    """After the prompt, however it was cut: the same positions, ascending, with rows as an uncompressed cache has."""
    model, ids = tiny.build(kind), tiny.tokens(PROMPT)
    native = make_prompt_cache(model)
    prefill(model, native, ids, 512)
    runs = {step: fed(model, config_of(name), ids, step) for step in ((0, 7, 512) if name not in BOUNDED else (0, 512))}
    for step, caches in runs.items():
        slots = [native[cache.layer.index] for cache in caches]
        for cache, slot, other in zip(caches, slots, runs[512], strict=True):
            assert cache.offset == PROMPT
            positions = np.array(cache.positions)
            assert np.array_equal(positions, np.array(other.positions)), step
            keys, values = cache.materialize()
            at = np.broadcast_to(positions, (1, keys.shape[1], keys.shape[2]))
            for head in range(keys.shape[1]):
                held = at[0, head] >= 0
                kept = at[0, head][held]
                assert (np.diff(kept) > 0).all() and kept[-1] == PROMPT - 1 and (kept[:4] == np.arange(4)).all()
                if name in BOUNDED:
                    continue  # its last token saw fewer rows, and its sinks move along: by design
                for mine, theirs in ((keys, slot.keys), (values, slot.values)):
                    # float32, prompts cut differently
                    got, want = np.array(mine[0, head])[held], np.array(theirs[0, head])[kept]
                    assert np.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DROPPING)
def test_offsets_and_new_keys_stay_true(name: str) -> None:
    """100 tokens later: positions count on, and the newest key of the first layer is the model's own."""
    model, ids, more = tiny.build("llama"), tiny.tokens(PROMPT), tiny.tokens(100, seed=3)
    native, caches = make_prompt_cache(model), KVCacheBuilder.for_model(model, config_of(name))
    for cache in (native, caches):
        prefill(model, cache, ids, 64)
        decode(model, cache, more)
    first = caches[0]
    assert first.offset == PROMPT + 100
    newest = np.array(first.positions) == PROMPT + 99
    keys = np.array(first.materialize()[0])
    rows = np.broadcast_to(newest, keys.shape[:3])
    want = np.array(native[0].keys[0, :, PROMPT + 99])
    assert np.allclose(keys[rows], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DROPPING)
def test_budget_beyond_the_prompt_changes_nothing(name: str) -> None:
    """Bit for bit the uncompressed cache, prompt and decoding, while nothing has to go."""
    model, ids = tiny.build("llama"), tiny.tokens(BUDGET - 30)
    native, caches = make_prompt_cache(model), KVCacheBuilder.for_model(model, config_of(name))
    if name == "rocketkv":  # a short prompt: it reads at least its window and sinks
        ids = ids[:, :8]
    for run, tokens in ((prefill, ids), (decode, tiny.tokens(4, seed=5))):
        arguments = (32,) if run is prefill else ()
        want, got = (run(model, cache, tokens, *arguments) for cache in (native, caches))  # type: ignore[arg-type]
        assert np.array_equal(want, got)


@pytest.mark.real_model
@pytest.mark.xdist_group("real")
@pytest.mark.parametrize("name", DROPPING)
def test_real_prompts_keep_the_same_tokens(name: str, smollm2: tuple[Any, Any]) -> None:
    """SmolLM2, prompt in steps and whole. Rounding decides close ranks: one token of two hundred may differ."""
    from veloxquant_mlx.cli.demo import passage

    model, tokenizer = smollm2
    ids = mx.array(list(tokenizer.encode(passage()))[:PROMPT])[None]
    config = KVCacheConfig(**{**config_of(name).__dict__, "head_dim": 64})
    whole = fed(model, config, ids, 0)
    assert same_kept(whole, fed(model, config, ids, 40)) >= 0.995
