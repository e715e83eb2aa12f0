"""MiniCache in models: which layers are merged, what each holds, and that tokens stay those of the exact caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache, trim_prompt_cache

from tests.matrix import identical, same_state
from tests.models import tiny
from tests.models.running import decode, lively, prefill, token_list
from tests.models.test_biased_keys import biased
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, cache_report, load_cache, save_cache
from veloxquant_mlx.models.bias import NOTE

LAYERS, PROMPT = 7, 300
# Random layers are little alike: of pairs a third has a cosine below this, of three or more rows more.
SOME = {2: -0.1, 3: -0.3, 5: -0.4}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama", num_hidden_layers=LAYERS)


def caches_of(model: Any, size: int = 2, start: float = 0.0, **fields: Any) -> list[Any]:
    fields = {"minicache_retention_threshold": SOME[size], **fields}
    config = KVCacheConfig(method="minicache", minicache_group_size=size, minicache_start_frac=start, **fields)
    return KVCacheBuilder.for_model(model, config)


def groups(caches: list[Any]) -> list[int]:
    """Layers per group."""
    out: dict[Any, int] = {}
    for cache in caches:
        out[cache.coordinator or id(cache)] = out.get(cache.coordinator or id(cache), 0) + 1
    return list(out.values())


def held(arrays: list[mx.array]) -> int:
    return sum({id(a): a.nbytes for a in arrays}.values())


@pytest.mark.parametrize(
    ("start", "size", "want"),
    [
        (0.0, 2, [2, 2, 2, 1]),
        (0.5, 2, [1, 1, 1, 1, 2, 1]),
        (0.5, 3, [1, 1, 1, 1, 3]),
        (0.2, 3, [1, 1, 3, 2]),
        (0.0, 5, [5, 2]),
        (0.9, 2, [1] * 7),
        (1.0, 2, [1] * 7),
    ],
)
def test_which_layers_are_merged(model: Any, start: float, size: int, want: list[int]) -> None:
    caches = caches_of(model, size, start)
    assert groups(caches) == want
    notes = [" ".join(cache.describe()["notes"]) for cache in caches]
    first = int(np.ceil(start * LAYERS))
    assert all("minicache_start_frac" in note for note in notes[:first])
    assert not any("minicache_start_frac" in note for note in notes[first:])
    assert ("no partner" in notes[-1]) == (want[-1] == 1 and first < LAYERS)
    assert ("share the mean" in notes[first if first < LAYERS else 0]) == (size > 2)


@pytest.mark.parametrize(("size", "start"), [(2, 0.0), (2, 0.5), (3, 0.0), (5, 0.0)])
def test_what_is_held(model: Any, size: int, start: float) -> None:
    """Layers before the start hold what mlx_lm's cache holds; shared arrays are counted once; sums are the truth."""
    caches, plain = caches_of(model, size, start), make_prompt_cache(model)
    ids = tiny.tokens(PROMPT)
    for each in (caches, plain):
        prefill(model, each, ids, 100)
    first = int(np.ceil(start * LAYERS))
    for mine, theirs in zip(caches[: first + 1], plain, strict=False):  # the first group's rows were attended exactly
        keys, values = mine.materialize()
        if mine is not caches[first]:
            n = theirs.offset
            assert identical(keys, theirs.keys[:, :, :n]) and identical(values, theirs.values[:, :, :n])
            assert mine.describe()["bytes"]["packed"] == 0
    arrays = [a for cache in caches for a in cache.arrays().values()]
    streams = [stream for cache in caches for stream in (cache.store.keys, cache.store.values) if stream.packed]
    every = [*arrays, *(a for stream in streams for a in stream.packed.codes.values())]
    assert cache_report(caches).nbytes == held(arrays) == held(every)
    assert any("retention rate" in note for note in caches[first].describe()["notes"])


def test_a_model_whose_rows_are_all_retained_answers_as_ever() -> None:
    model = tiny.build("llama")
    prompt = tiny.tokens(PROMPT)
    fine = caches_of(model, minicache_retention_threshold=1.0)
    got, want = (prefill(model, caches, prompt, 100) for caches in (fine, make_prompt_cache(model)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # float32 sums
    assert all("rows stay as they came: 100%" in " ".join(c.describe()["notes"]) for c in fine)


@pytest.mark.parametrize("threshold", [1.0, -0.1], ids=["as they came", "merged"])
def test_keys_without_their_bias_are_no_wider(threshold: float) -> None:
    """What is left of keys in float16 once a bias is taken out, in float32, is held in float16 again."""
    model = biased(60.0)
    caches = caches_of(model, minicache_retention_threshold=threshold)
    ids = tiny.tokens(PROMPT)
    got, want = (prefill(model, each, ids, 100) for each in (caches, make_prompt_cache(model)))
    stream = caches[0].store.keys
    assert NOTE in caches[0].describe()["notes"] and stream.n_sealed == 256
    assert {a.dtype for a in stream.packed.codes.values()} == {mx.float16}
    if threshold == 1.0:  # rows rounded to 11 bits, for logits of order one
        np.testing.assert_allclose(got, want, atol=0.02)


@pytest.mark.parametrize("threshold", [1.0, -0.1], ids=["as they came", "merged"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_bias_in_one_layer_of_a_group(threshold: float, layer: int, dtype: mx.Dtype) -> None:
    """Keys of the other layer come in the model's dtype; what they share is no wider than that either."""
    model = biased(60.0)
    other = model.layers[1 - layer].self_attn.k_proj
    other.bias = mx.zeros_like(other.bias)
    model.set_dtype(dtype)
    caches = caches_of(model, minicache_retention_threshold=threshold)
    mx.eval(model(tiny.tokens(PROMPT), cache=caches))
    assert [cache.layer.key_bias is not None for cache in caches] == [layer == 0, layer == 1]
    assert {a.itemsize for cache in caches for a in cache.store.keys.packed.codes.values()} == {2}


@pytest.mark.parametrize("size", SOME)
def test_trim_of_the_list(model: Any, size: int) -> None:
    """At whole blocks it is what a fresh cache fed the shorter text holds, bit for bit."""
    caches, fresh = caches_of(model, size, minicache_max_ctx=64), caches_of(model, size, minicache_max_ctx=64)
    ids, steps = tiny.tokens(320), range(0, 320, 64)
    for start in steps:
        mx.eval(model(ids[:, start : start + 64], cache=caches))
    assert trim_prompt_cache(caches, 128) == 128
    for start in steps[:3]:
        mx.eval(model(ids[:, start : start + 64], cache=fresh))
    more = tiny.tokens(70, seed=1)
    np.testing.assert_array_equal(decode(model, caches, more), decode(model, fresh, more))
    assert all(same_state(a, b) for a, b in zip(caches, fresh, strict=True))


@pytest.mark.parametrize("size", SOME)
@pytest.mark.parametrize("ours", [True, False], ids=["save_cache", "save_prompt_cache"])
def test_files(model: Any, size: int, ours: bool, tmp_path: Path) -> None:
    caches, file = caches_of(model, size), str(tmp_path / "file.safetensors")
    prefill(model, caches, tiny.tokens(PROMPT), 100)
    (save_cache if ours else save_prompt_cache)(file, caches)
    loaded: list[Any] = load_cache(file, model) if ours else load_prompt_cache(file)  # type: ignore[reportAssignmentType]
    more = tiny.tokens(40, seed=2)
    np.testing.assert_array_equal(decode(model, loaded, more), decode(model, caches, more))
    assert [c.nbytes for c in loaded] == [c.nbytes for c in caches]


@pytest.mark.parametrize("size", [2, 3])
def test_batches(model: Any, size: int) -> None:
    """Prompts of different lengths in mlx_lm's batches give the tokens that each gives alone."""
    prompts = [token_list(300), token_list(270, seed=1), token_list(20, seed=2)]

    def run(some: list[list[int]]) -> list[list[int]]:
        batch = BatchGenerator(model, max_tokens=25, prefill_step_size=64, sampler=lively)
        ids = batch.insert(some, caches=[caches_of(model, size) for _ in some])
        out: dict[int, list[int]] = {i: [] for i in ids}
        while responses := batch.next_generated():
            for response in responses:
                out[response.uid].append(response.token)
        return list(out.values())

    apart = [run([prompt])[0] for prompt in prompts]
    assert run(prompts) == apart and [len(tokens) for tokens in apart] == [25] * 3
