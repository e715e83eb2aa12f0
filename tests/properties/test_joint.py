"""Layers that are packed together: one state whatever the history, shared arrays once, copies and files whole."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from tests.joint import METHODS, SIZES, WAITS, group, layers, meet, run
from tests.matrix import feed, identical, same_state, split, stored_bytes
from veloxquant_mlx import CacheStateError, KVCacheConfig, QuantizerConfigError
from veloxquant_mlx.cache.batch import CompressedBatchCache
from veloxquant_mlx.cache.compose import compose
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.cache.registry import method
from veloxquant_mlx.cache.report import cache_report
from veloxquant_mlx.core.types import LayerInfo
from veloxquant_mlx.observers import EventLog

pytestmark = pytest.mark.parametrize("name", METHODS)
T = 300


def prompt(n: int = T) -> list[int]:
    """A prompt as mlx_lm feeds it: its last token alone."""
    return [n - 1, 1]


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_state_does_not_depend_on_chunks(name: str, members: int, chunk: int) -> None:
    """Where a fit waits for the end of the prompt, the prompts are the same: the second of two tokens would end one."""
    data, first = layers(members), 201 if name in WAITS else 0
    once, often = group(name, members), group(name, members)
    run(once, data, [*prompt(first), *prompt(T - first)] if first else [T])
    pieces = [size for n in (first, T - first) for size in (*split(n - 1, max(chunk, 2)), 1)]
    run(often, data, pieces if first else split(T, chunk))
    assert all(same_state(a, b) for a, b in zip(once, often, strict=True))
    assert all(cache.offset == T and cache.store.n == T for cache in often)


@pytest.mark.parametrize("members", SIZES)
def test_attention_is_that_over_decoded_rows(name: str, members: int) -> None:
    """The packed path against the float32 reference on the same codes: sums of 300 products, in another order."""
    data, chunks = layers(members), [*prompt(T - 10), *[1] * 10]
    fast, slow = group(name, members), group(name, members, enable_vectorized_attend=False)
    for a, b in zip(run(fast, data, chunks), run(slow, data, chunks), strict=True):
        assert mx.allclose(a, b, rtol=2e-3, atol=2e-3)
    packed = [cache for cache in fast if cache.store.sealed]
    assert all(any("packed" in path for path in cache.describe()["attention"]) for cache in packed)
    assert len(packed) == members or (members == 1 and name == "minicache")


@pytest.mark.parametrize("members", SIZES)
def test_what_is_shared_is_held_and_counted_once(name: str, members: int) -> None:
    """The receipts add up to the arrays that exist."""
    caches = group(name, members)
    run(caches, layers(members), prompt())
    arrays = [a for cache in caches for a in cache.arrays().values()]
    streams = [stream for cache in caches for stream in (cache.store.keys, cache.store.values)]
    every = {id(a): a for s in streams if s.packed for a in (*s.packed.codes.values(), *s.packed.fitted.values())}
    assert len({id(a) for a in arrays}) == len(arrays) and every.keys() <= {id(a) for a in arrays}
    assert cache_report(caches).nbytes == sum(a.nbytes for a in arrays) + sum(
        {id(a): a.nbytes for cache in caches for a in cache.constants()}.values()
    )
    if members > 1:  # float32 rows, where a report compares with 16 bits
        assert stored_bytes(caches[0]) > 0 and cache_report(caches).ratio > (1 if name != "minicache" else 0.5)


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("cut", [1, 31, 32, 33, 129, T])
def test_trim_cuts_the_group_once_all_are_trimmed(name: str, members: int, cut: int) -> None:
    data = layers(members)
    caches = group(name, members)
    run(caches, data, prompt())
    before = [cache.materialize() for cache in caches]
    for cache in caches:
        assert cache.is_trimmable() and cache.trim(cut) == cut
        if cut < T:  # at once, whatever the others still hold
            assert cache.materialize()[0].shape[2] == T - cut
    assert all(cache.offset == T - cut and cache.store.n == T - cut for cache in caches)
    if cut < T:
        for cache, then in zip(caches, before, strict=True):
            for now, old in zip(cache.materialize(), then, strict=True):
                assert mx.allclose(now, old[:, :, : T - cut], rtol=1e-5, atol=1e-5)
    run(caches, layers(members, seed=7, tokens=60), [59, 1])
    assert all(cache.offset == cache.store.n == T - cut + 60 for cache in caches)
    counts = {tuple(cache.store.counts()) for cache in caches}
    assert len(counts) == 1


def test_trim_of_copies_made_one_by_one(name: str) -> None:
    """As a server's prompt cache does it: rows leave a batch layer by layer, are trimmed, and run again."""
    data, more = layers(3), layers(3, seed=9, tokens=40)
    whole, apart = group(name, 3), group(name, 3)
    for caches in (whole, apart):
        run(caches, data, prompt())
    apart = [copy.deepcopy(cache) for cache in apart]
    with pytest.raises(CacheStateError, match="copied or loaded apart"):
        apart[1].materialize()
    for cache in (*whole, *apart):
        cache.trim(130)
    for a, b in zip(run(whole, more, [39, 1]), run(apart, more, [39, 1]), strict=True):
        assert identical(a, b)
    assert all(same_state(a, b) for a, b in zip(whole, apart, strict=True))


@pytest.mark.parametrize("members", SIZES)
def test_copies_of_a_list_are_whole_and_independent(name: str, members: int) -> None:
    data = layers(members)
    caches, twin = group(name, members), group(name, members)
    for each in (caches, twin):
        run(each, data, prompt())
    clone = copy.deepcopy(caches)
    assert [c.nbytes for c in clone] == [c.nbytes for c in caches]
    assert all(
        identical(*pair)
        for a, b in zip(clone, caches, strict=True)
        for pair in zip(a.materialize(), b.materialize(), strict=True)
    )
    run(clone, layers(members, seed=3, tokens=140), [139, 1])
    assert all(same_state(a, b) for a, b in zip(caches, twin, strict=True))
    more = layers(members, seed=4, tokens=70)
    for a, b in zip(run(caches, more, [69, 1]), run(twin, more, [69, 1]), strict=True):
        assert identical(a, b)


@pytest.mark.parametrize("members", SIZES)
def test_prompt_cache_files(name: str, members: int, tmp_path: Path) -> None:
    """What is shared is saved once, with the first layer; the file is about as large as the caches."""
    caches, file = group(name, members), str(tmp_path / "prompt.safetensors")
    run(caches, layers(members), prompt())
    save_prompt_cache(file, caches)
    assert Path(file).stat().st_size < sum(stored_bytes(c) for c in caches) + 8192 * members
    loaded: list[CompressedKVCache] = load_prompt_cache(file)  # type: ignore[reportAssignmentType]
    assert all(same_state(a, b) for a, b in zip(loaded, caches, strict=True))
    more = layers(members, seed=8, tokens=45)
    for a, b in zip(run(loaded, more, [40, *[1] * 5]), run(caches, more, [40, *[1] * 5]), strict=True):
        assert identical(a, b)
    assert all(same_state(a, b) for a, b in zip(loaded, caches, strict=True))


@pytest.mark.parametrize("by_hand", [0, 1])
def test_layers_that_do_and_do_not_attend_through_their_caches(name: str, by_hand: int) -> None:
    """Rows of a layer with attention code of its own settle one call later: the group packs what all of them have."""
    data, caches = layers(2, tokens=T + 40), group(name, 2)
    for at, n in [(0, 200), (200, 99), *[(at, 1) for at in range(299, T + 40)]]:
        meet(caches, n)
        for j, (cache, rows) in enumerate(zip(caches, data, strict=True)):
            part = rows.part(at, at + n)
            cache.update_and_fetch(part.k, part.v)
            if j != by_hand:
                cache.attend(part.q, scale=0.125, mask=None if n == 1 else "causal")
    assert all(cache.store.keys.n_sealed >= 256 for cache in caches)
    assert all(cache.materialize()[0].shape[2] == T + 40 for cache in caches)


def test_copies_after_a_forward_that_broke_off(name: str) -> None:
    """A layer raised: the list can be copied and saved, and goes on once what its first layers took is taken back."""
    caches, twin, data = group(name, 3), group(name, 3), layers(3)
    for each in (caches, twin):
        run(each, data, prompt())
    meet(caches, 40)
    feed(caches[0], data[0].part(0, 40), [40])
    clone, loaded = copy.deepcopy(caches), [CompressedKVCache.from_state(cache.state) for cache in caches]
    for each in (caches, clone, loaded):
        assert cache_report(each, at_rest=True).layers[0].tokens == T + 40
        with pytest.raises(CacheStateError, match="Trim all"):
            meet(each, 1)
        each[0].trim(40)
    more = layers(3, seed=6, tokens=70)
    want = run(twin, more, [69, 1])
    for each in (caches, clone, loaded):
        assert all(identical(*pair) for pair in zip(run(each, more, [69, 1]), want, strict=True))


def test_arrays_may_be_replaced(name: str) -> None:
    """As pipeline-parallel models do: every layer then reads the new ones, and keeps none of the old alive."""
    caches = group(name, 2)
    run(caches, layers(2), prompt())
    for cache in caches:
        cache.keys = mx.depends(cache.keys or [], [mx.zeros(1)])
    meet(caches, 1)
    arrays = {id(a) for cache in caches for a in cache.arrays().values()}
    streams = [stream for cache in caches for stream in (cache.store.keys, cache.store.values)]
    every = [a for s in streams if s.packed for a in (*s.packed.codes.values(), *s.packed.fitted.values())]
    assert {id(a) for a in every} <= arrays


def test_batches_are_rows_of_their_own(name: str) -> None:
    """Two sequences of different lengths in one batch give what each gives alone; so does what is taken out again."""
    long, short = layers(3), layers(3, seed=5, tokens=170)
    alone, singles = [], []
    for data, n in ((long, T), (short, 170)):
        caches = group(name, 3)
        run(caches, data, prompt(n))
        singles.append(caches)
        alone.append(copy.deepcopy(caches))
    batch = [CompressedBatchCache.merge([a, b]) for a, b in zip(*singles, strict=True)]
    more = [layers(3, seed=s, tokens=80) for s in (11, 12)]
    want = [run(caches, data, [1] * 80) for caches, data in zip(alone, more, strict=True)]
    for i in range(80):
        meet(batch, 1)
        for j, cache in enumerate(batch):
            q, k, v = (mx.concatenate([getattr(d[j], n)[:, :, i : i + 1] for d in more]) for n in "qkv")
            cache.update_and_fetch(k, v)
            out = cache.attend(q, scale=0.125)
            assert mx.allclose(out, mx.concatenate([w[j][:, :, i : i + 1] for w in want]), rtol=1e-4, atol=1e-5)
    for i, caches in enumerate(alone):
        assert all(same_state(layer.extract(i), cache) for layer, cache in zip(batch, caches, strict=True))


def test_groups_side_by_side_share_nothing(name: str) -> None:
    """Two groups of one model, and two sequences: as if each were alone."""
    data = layers(4)
    model = [*group(name, 2, number=0), *group(name, 2, number=1)]
    other = [*group(name, 2, number=0), *group(name, 2, number=1)]
    at = 0
    for n in prompt():
        for caches, rows in ((model, data), (other, layers(4, seed=20))):
            run(caches, [d.part(at, at + n) for d in rows], [n])
        at += n
    for number in (0, 1):
        pair = group(name, 2)
        run(pair, data[2 * number : 2 * number + 2], prompt())
        assert all(same_state(a, b) for a, b in zip(pair, model[2 * number : 2 * number + 2], strict=True))


def test_misuse_is_refused_before_anything_changes(name: str) -> None:
    data = layers(3)
    caches = group(name, 3)
    rows = data[1].part(0, 40)
    with pytest.raises(CacheStateError, match="whole list"):
        caches[1].update_and_fetch(rows.k, rows.v)  # no forward pass has begun
    run(caches, data, [T])
    meet(caches, 40)
    with pytest.raises(CacheStateError, match="whole list"):
        caches[1].update_and_fetch(rows.k, rows.v)  # before layer 0
    assert [c.offset for c in caches] == [T] * 3
    with pytest.raises(CacheStateError, match="2 caches of a group of 3"):
        meet(caches[:2], 1)
    caches[0].trim(5)
    with pytest.raises(CacheStateError, match=r"\[295, 300\] tokens"):
        meet(caches, 1)
    caches[1].trim(5)
    caches[2].trim(5)
    run(caches, layers(3, tokens=5), [5])
    assert [c.offset for c in caches] == [T] * 3


def test_models_that_attend_by_themselves(name: str) -> None:
    """Attention never comes back: rows are packed one call later, and what is given out is what is held."""
    data = layers(2)
    caches, outs = group(name, 2), []
    for n, at in ((199, 0), (1, 199), *((1, 200 + i) for i in range(70))):
        meet(caches, n)
        outs = [
            c.update_and_fetch(d.k[:, :, at : at + n], d.v[:, :, at : at + n])
            for c, d in zip(caches, data, strict=True)
        ]
        mx.eval(outs, [c.state for c in caches])
    for cache, (keys, values) in zip(caches, outs, strict=True):
        assert isinstance(keys, mx.array) and keys.shape[2] == values.shape[2] == 270
        assert cache.store.keys.n_sealed > 100
    for cache in caches:
        cache.settle()
    counts = {tuple(c.store.counts()) for c in caches}
    assert len(counts) == 1


def test_observers_hear_of_every_layer(name: str) -> None:
    log = EventLog()
    caches = group(name, 2, observers=[log])
    run(caches, layers(2), prompt())
    layers_told = {event.metadata["layer"] for event in log.events if event.stage == "encode"}
    assert layers_told == {0, 1}


def test_long_chunks_are_a_line_in_the_receipt(name: str) -> None:
    field = f"{name.partition(' ')[0]}_max_ctx"
    fields: dict[str, Any] = {field: 50}
    caches = group(name, 2, **fields)
    run(caches, layers(2), [50, 250])
    assert any(f"more tokens than {field}=50" in note for note in caches[0].describe()["notes"])
    fields[field] = 250
    caches = group(name, 2, **fields)
    run(caches, layers(2), [50, 250])
    assert not any("more tokens" in note for note in caches[0].describe()["notes"])


def test_no_pair_with_a_method_that_drops(name: str) -> None:
    config, snap = group(name, 2)[0].config, KVCacheConfig(method="snapkv")
    layer = LayerInfo(member=0, members=2)
    recipes = method("snapkv").recipe(snap, layer), method(config.method).recipe(config, layer)
    with pytest.raises(QuantizerConfigError, match="several layers together"):
        compose(*recipes, ("snapkv", config.method))


def test_nothing_waits_for_the_cycle_collector(name: str) -> None:
    caches = group(name, 3)
    run(caches, layers(3), prompt())
    stores = [weakref.ref(cache.store) for cache in caches]
    gc.disable()
    try:
        del caches
        assert [store() for store in stores] == [None] * 3
    finally:
        gc.enable()


def test_a_batch_of_equal_lengths_in_one_cache(name: str) -> None:
    """Two rows in one cache are what two caches hold, up to the order of sums."""
    one, two = layers(2, shape=(1, 2, 64, 64)), layers(2, seed=30, shape=(1, 2, 64, 64))
    both = [
        type(a)(*(mx.concatenate([getattr(a, n), getattr(b, n)]) for n in "qkv")) for a, b in zip(one, two, strict=True)
    ]
    caches = group(name, 2, shape=(2, 2, 64, 64))
    outs = run(caches, both, prompt())
    for i, data in enumerate((one, two)):
        single = group(name, 2)
        for a, b in zip(outs, run(single, data, prompt()), strict=True):
            assert np.allclose(np.array(a[i : i + 1]), np.array(b), rtol=1e-3, atol=1e-3)
