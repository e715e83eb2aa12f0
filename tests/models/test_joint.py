"""Cross-layer methods on whole models: groups across files, processes that load them, and models of mixed layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from tests.joint import METHODS
from tests.models import tiny
from tests.models.running import decode, prefill
from veloxquant_mlx import CacheStateError, KVCacheBuilder, KVCacheConfig, cache_report, load_cache, save_cache
from veloxquant_mlx.attention import forward
from veloxquant_mlx.cache.layer import CompressedKVCache

pytestmark = pytest.mark.parametrize("name", METHODS)
PROMPT = 150


def config(name: str, **fields: Any) -> KVCacheConfig:
    return KVCacheConfig(**{"method": name.partition(" ")[0], **METHODS[name], **fields})


@pytest.fixture
def model() -> Any:
    return tiny.build("llama", num_hidden_layers=5)


@pytest.fixture
def fresh_process() -> Iterator[Any]:
    """Call it: no model is prepared any more, as in a process that has just begun."""
    yield forward.uninstall
    forward.uninstall()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_five_layers_in_groups(name: str, size: int, model: Any) -> None:
    """Whole groups and a short last one; the receipt adds up; the next token is near that of an exact cache."""
    caches = KVCacheBuilder.for_model(model, config(name, **{f"{name.partition(' ')[0]}_group_size": size}))
    logits = prefill(model, caches, tiny.tokens(PROMPT), 64)
    report = cache_report(caches)
    arrays = {id(a): a.nbytes for cache in caches for a in (*cache.arrays().values(), *cache.constants())}
    assert report.nbytes == sum(arrays.values()) and report.layers[0].tokens == PROMPT
    assert np.isfinite(logits).all() and np.isfinite(decode(model, caches, tiny.tokens(40, seed=1))).all()
    assert {cache.offset for cache in caches} == {PROMPT + 40}


def test_file_in_a_new_process(name: str, model: Any, tmp_path: Path, fresh_process: Any) -> None:
    """``load_cache`` gets the model ready by itself: generation goes on bit for bit."""
    caches, file = KVCacheBuilder.for_model(model, config(name)), tmp_path / "cache.safetensors"
    prefill(model, caches, tiny.tokens(PROMPT), 64)
    save_cache(file, caches)
    more = tiny.tokens(30, seed=2)
    want = decode(model, caches, more)
    fresh_process()
    loaded = load_cache(file, model)
    rows = [cache.materialize() for cache in loaded]
    assert all(keys.shape[2] == PROMPT for keys, _ in rows)
    assert np.array_equal(decode(model, loaded, more), want)


def test_file_of_mlx_lm_in_a_new_process(name: str, model: Any, tmp_path: Path, fresh_process: Any) -> None:
    """mlx_lm's loader knows no model: without one that is prepared the caches say what is missing, and lose nothing.

    Layers before the first group have taken the token by then: it is taken back.
    """
    caches, file = KVCacheBuilder.for_model(model, config(name)), str(tmp_path / "prompt.safetensors")
    prefill(model, caches, tiny.tokens(PROMPT), 64)
    save_prompt_cache(file, caches)
    more = tiny.tokens(30, seed=2)
    want = decode(model, caches, more)
    fresh_process()
    loaded: list[CompressedKVCache] = load_prompt_cache(file)  # type: ignore[reportAssignmentType]
    with pytest.raises(CacheStateError, match="for_model"):
        mx.eval(model(more[:, :1], cache=loaded))
    for cache in loaded:
        cache.trim(cache.offset - PROMPT)
    KVCacheBuilder.for_model(model, config(name))
    assert np.array_equal(decode(model, loaded, more), want)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma3n", "qwen3", "qwen3_next"])
def test_models_of_mixed_layers(name: str, kind: str) -> None:
    """Only layers with a cache to compress are grouped; windows, recurrent state and shared rows stay what they are."""
    model = tiny.build(kind)
    caches = KVCacheBuilder.for_model(model, config(name))
    ours = [cache for cache in caches if isinstance(cache, CompressedKVCache)]
    prefill(model, caches, tiny.tokens(PROMPT), 64)
    assert np.isfinite(decode(model, caches, tiny.tokens(20, seed=1))).all()
    assert ours and {cache.offset for cache in ours} == {PROMPT + 20}
