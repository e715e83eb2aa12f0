"""The seam: bit-identical through a pass-through cache on every architecture, reversible, and invisible to others."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tests.models import tiny
from veloxquant_mlx.attention import hook
from veloxquant_mlx.attention.hook import KVHandle
from veloxquant_mlx.core.exceptions import CacheInputError
from veloxquant_mlx.models.inspect import cache_slots

# Latent attention and models without a plain KVCache keep all of their own caches: nothing to prove there.
COMPRESSIBLE = [name for name in tiny.CONFIGS if name not in ("deepseek_v3", "falcon_h1", "mamba2")]
ARRAY_MODE = ("gemma2", "stablelm")  # attention by hand; keys cast before the shared function


class PassThrough:
    """Keeps keys and values as they come, in mlx_lm's own storage, and hands out handles once it knows that it may."""

    def __init__(self) -> None:
        self._inner: Any = KVCache()
        self._issued: tuple[mx.array, mx.array] | None = None
        self.shared = False
        self.mode = "learn"
        self.calls: list[tuple[tuple[int, ...], bool]] = []

    @property
    def offset(self) -> int:
        return self._inner.offset

    @property
    def state(self) -> list[mx.array]:
        return [] if self._inner.keys is None else list(self.materialize())

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.make_mask(*args, **kwargs)

    def materialize(self) -> tuple[mx.array, mx.array]:
        return self._inner.keys[..., : self.offset, :], self._inner.values[..., : self.offset, :]

    def _issue(self) -> tuple[Any, Any]:
        if self.mode == "handle":
            keys, values = self.materialize()
            return KVHandle(self, "k", keys.shape, keys.dtype), KVHandle(self, "v", values.shape, values.dtype)
        return self._issued if self._issued is not None else self.materialize()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.mode == "learn" and self._issued is not None:
            self.mode = "array"  # nobody came back for the last update
        arrays = self._inner.update_and_fetch(keys, values)
        self._issued = arrays if self.mode == "learn" else None
        return self._issue()

    def keys_and_values(self) -> tuple[Any, Any]:
        self.shared = True
        return self._issue()

    def attend(self, queries: mx.array, *, scale: float, mask: Any, sinks: Any) -> mx.array:
        if self.mode == "learn":
            self.mode, self._issued = "handle", None
        self.calls.append((queries.shape, sinks is not None))
        keys, values = self.materialize()
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


@pytest.fixture(autouse=True)
def fresh_seam() -> Iterator[None]:
    hook.uninstall()
    yield
    hook.uninstall()


def passing_caches(model: Any) -> list[Any]:
    return [slot.native if slot.layer is None else PassThrough() for slot in cache_slots(model)]


def logits(model: Any, caches: list[Any]) -> np.ndarray:
    """A prompt in chunks of 9 and 5 tokens, then 4 single tokens."""
    ids, out = tiny.tokens(18, seed=1), []
    for start, stop in ((0, 9), (9, 14), (14, 15), (15, 16), (16, 17), (17, 18)):
        out.append(model(ids[:, start:stop], cache=caches))
        mx.eval(out[-1], [c.state for c in caches])
    return np.array(mx.concatenate(out, axis=1))


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_pass_through_is_bit_identical(name: str) -> None:
    model = tiny.build(name)
    expected = logits(model, make_prompt_cache(model))
    caches = passing_caches(model)
    ours = [c for c in caches if isinstance(c, PassThrough)]
    np.testing.assert_array_equal(logits(model, caches), expected)
    assert ours
    assert {c.mode for c in ours} == {"array" if name in ARRAY_MODE else "handle"}


def test_real_queries_and_sinks_arrive() -> None:
    model = tiny.build("gpt_oss")  # passes cache and scale by position
    caches = passing_caches(model)
    logits(model, caches)
    assert caches[1].calls == [((1, 4, n, 16), True) for n in (9, 5, 1, 1, 1, 1)]


@pytest.mark.parametrize("name", ["gemma3n", "gemma4_text", "afm7"])
def test_second_reader_marks_the_owner_shared(name: str) -> None:
    model = tiny.build(name)
    caches = passing_caches(model)
    logits(model, caches)
    ours = [c for c in caches if isinstance(c, PassThrough)]
    assert ours[-1].shared


def test_a_cache_nobody_else_reads_is_not_shared() -> None:
    model = tiny.build("llama")
    caches = passing_caches(model)
    logits(model, caches)
    assert not any(c.shared for c in caches)


def test_without_the_seam_caches_fall_back_to_arrays() -> None:
    model = tiny.build("llama")
    caches: list[Any] = [PassThrough() for _ in range(2)]
    np.testing.assert_array_equal(logits(model, caches), logits(model, make_prompt_cache(model)))
    assert {c.mode for c in caches} == {"array"}


def test_install_is_idempotent_and_reversible() -> None:
    tiny.build("llama")
    original = base.scaled_dot_product_attention
    assert hook.install() > 0 and hook.installed()
    assert hook.install() == 0
    assert hook.uninstall() > 0 and not hook.installed()
    assert hook.uninstall() == 0
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, "scaled_dot_product_attention"):
            assert module.scaled_dot_product_attention is original, name


def test_handle_without_the_seam_is_a_loud_error() -> None:
    model = tiny.build("llama")
    caches = passing_caches(model)
    logits(model, caches)
    hook.uninstall()
    with pytest.raises(TypeError):
        model(tiny.tokens(1), cache=caches)


def test_two_models_in_two_threads() -> None:
    models = [tiny.build("llama"), tiny.build("qwen3", seed=1)]
    expected = [logits(m, make_prompt_cache(m)) for m in models]
    results: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def work(index: int) -> None:
        for _ in range(3):
            hook.install(models[index])
            results[index].append(logits(models[index], passing_caches(models[index])))

    threads = [threading.Thread(target=work, args=(i,)) for i in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, runs in results.items():
        assert len(runs) == 3
        for run in runs:
            np.testing.assert_array_equal(run, expected[index])


def test_modules_imported_later_are_covered() -> None:
    hook.install()
    sys.modules.pop("mlx_lm.models.helium", None)
    helium = importlib.import_module("mlx_lm.models.helium")
    assert vars(helium)["scaled_dot_product_attention"] is base.scaled_dot_product_attention
    assert hook.install() == 0


CUSTOM = """
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention as sdpa

class Base(nn.Module):
    def __call__(self, x, mask=None, cache=None):
        keys, values = cache.update_and_fetch(x, x + 1)
        return sdpa(x, keys, values, cache=cache, scale=1.0, mask=mask)

class Attention(Base):
    pass
"""


def custom_module() -> types.ModuleType:
    """What ``model_file`` does: code under an alias, in a module that sys.modules does not know."""
    module = types.ModuleType("custom_model")
    exec(CUSTOM, vars(module))
    return module


def test_model_files_and_aliases_are_covered() -> None:
    module = custom_module()
    original = module.sdpa
    attention, cache = module.Attention(), PassThrough()
    hook.install(attention)
    attention(mx.ones((1, 1, 2, 4)), cache=cache)
    assert cache.mode == "handle"
    hook.uninstall()
    assert module.sdpa is original


def test_nothing_is_kept_alive() -> None:
    module = custom_module()
    attention, cache = module.Attention(), PassThrough()
    hook.install(attention)
    attention(mx.ones((1, 1, 2, 4)), cache=cache)
    alive = [weakref.ref(x) for x in (attention, cache, module.Attention)]
    del attention, cache, module
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_mlx_vlm_is_covered_where_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> str:
        return "vlm"

    scaled_dot_product_attention.__module__ = "mlx_vlm.models.base"
    for name in ("mlx_vlm", "mlx_vlm.models", "mlx_vlm.models.base", "mlx_vlm.models.some.language"):
        module = types.ModuleType(name)
        vars(module)["scaled_dot_product_attention"] = scaled_dot_product_attention
        monkeypatch.setitem(sys.modules, name, module)
    hook.install()
    for name in ("mlx_vlm.models.base", "mlx_vlm.models.some.language"):
        function = vars(sys.modules[name])["scaled_dot_product_attention"]
        assert function is not scaled_dot_product_attention
        assert function(1, 2, 3, cache=None, scale=1.0, mask=None) == "vlm"


def test_foreign_caches_and_other_patches_pass_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def patched_by_others(*args: Any, **kwargs: Any) -> str:
        seen.append((*args, kwargs))
        return "other"

    monkeypatch.setattr(base, "scaled_dot_product_attention", patched_by_others)
    hook.install()
    latent, cache = mx.ones((1, 1, 2, 4)), PassThrough()
    cache._issued = (latent, mx.zeros((1, 1, 2, 4)))  # keys are ours, values are not: MLA passes the latent twice
    for arguments, keywords in (
        ((latent, latent, latent, KVCache(), 1.0, None), {}),
        ((1, latent, latent), {"cache": cache}),
    ):
        assert vars(base)["scaled_dot_product_attention"](*arguments, **keywords) == "other"
        assert all(a is b for a, b in zip(seen[-1], (*arguments, keywords), strict=True) if not isinstance(a, dict))
    hook.uninstall()
    assert base.scaled_dot_product_attention is patched_by_others


def test_pairs_of_two_caches_are_refused() -> None:
    hook.install()
    a, b = PassThrough(), PassThrough()
    keys = KVHandle(a, "k", (1, 1, 2, 4), mx.float32)
    for values in (KVHandle(b, "v", (1, 1, 2, 4), mx.float32), mx.ones((1, 1, 2, 4))):
        with pytest.raises(CacheInputError, match="different caches"):
            base.scaled_dot_product_attention(mx.ones((1, 1, 1, 4)), keys, values, cache=a, scale=1.0, mask=None)


def test_handle_behaves_like_the_array_it_stands_for() -> None:
    cache = PassThrough()
    keys, values = mx.random.normal((1, 2, 3, 4)), mx.random.normal((1, 2, 3, 5))
    cache.update_and_fetch(keys, values)
    decoded: list[None] = []
    dense = cache.materialize
    cache.materialize = lambda: (decoded.append(None), dense())[1]  # type: ignore[method-assign]
    handle = KVHandle(cache, "v", values.shape, values.dtype)
    assert (handle.ndim, handle.shape, handle.dtype) == (4, (1, 2, 3, 5), mx.float32)
    assert handle.astype(mx.float32) is handle and handle.astype(mx.float16).dtype == mx.float16
    assert not hasattr(handle, "bits") and not isinstance(handle, mx.array)
    assert not decoded  # nothing so far needed the contents
    assert mx.array_equal(handle[..., 1:, :], values[..., 1:, :])
    assert mx.array_equal(handle.swapaxes(1, 2), values.swapaxes(1, 2))
    assert mx.array_equal(handle @ values.swapaxes(-1, -2), values @ values.swapaxes(-1, -2))
    assert mx.array_equal(2 * handle, 2 * values)
    assert handle.astype(mx.float16).materialize().dtype == mx.float16
