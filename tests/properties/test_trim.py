"""Trim: exact where storage allows it, refused before anything happens where it does not."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from tests.matrix import ROWS, Row, feed, stored_bytes, tensors
from veloxquant_mlx import CacheInputError, CacheStateError

KEEP = [r for r in ROWS if not r.drops]
DROP = [r for r in ROWS if r.drops]
CUTS = [1, 5, 31, 32, 33, 129, 300]


@pytest.mark.parametrize("row", KEEP, ids=[r.id for r in KEEP])
@pytest.mark.parametrize("cut", CUTS)
def test_trim_then_continue(row: Row, cut: int) -> None:
    """Rows that survive a trim are the rows of the longer text; what is fed afterwards is stored like anything else.

    A cut inside a block of channel groups brings its surviving rows back as they decode, half a step off; encoded
    again with new neighbours they move by up to half a step more, and the fresh cache is half a step off: 1.5 steps.
    """
    data, other = tensors(300), tensors(cut, seed=50)
    cache, fresh = row.cache(), row.cache()
    feed(cache, data, [300])
    before = cache.materialize()
    assert cache.trim(cut) == cut and cache.offset == 300 - cut
    if cut < 300:
        for now, then in zip(cache.materialize(), before, strict=True):
            assert now.shape[2] == 300 - cut
            assert mx.allclose(now, then[:, :, : 300 - cut], rtol=1e-5, atol=1e-5)
    feed(cache, other, [cut])
    joined = type(data)(
        *(mx.concatenate([getattr(data, n)[:, :, : 300 - cut], getattr(other, n)], axis=2) for n in "qkv")
    )
    feed(fresh, joined, [300])
    for c in (cache, fresh):
        c.end_prefill()
    (keys, values), (want_keys, want_values) = cache.materialize(), fresh.materialize()
    assert cache.offset == fresh.offset and stored_bytes(cache) == stored_bytes(fresh)
    # Values that are packed in blocks come back likewise, and may get other bits: steps are those of a token there.
    wide = joined.v.max(axis=3, keepdims=True) - joined.v.min(axis=3, keepdims=True)
    step = 1.5 * wide / (2**row.value_bits - 1) if row.value_bits else 1e-5 * (1 + mx.abs(want_values))
    assert mx.all(mx.abs(values - want_values) <= step)
    spread = joined.k.max(axis=2, keepdims=True) - joined.k.min(axis=2, keepdims=True)
    step = spread / (2**row.channel_bits - 1) if row.channel_bits else 1e-5
    assert mx.all(mx.abs(keys - want_keys) <= 1.5 * step + 1e-2)


@pytest.mark.parametrize("row", KEEP, ids=[r.id for r in KEEP])
def test_trim_limits(row: Row) -> None:
    cache = row.cache()
    assert cache.trim(3) == 0
    feed(cache, tensors(40), [40])
    with pytest.raises(CacheInputError, match="n=-1"):
        cache.trim(-1)
    assert cache.trim(1000) == 40 and cache.empty()
    feed(cache, tensors(60), [60])
    assert cache.offset == 60


@pytest.mark.parametrize("row", DROP, ids=[r.id for r in DROP])
def test_refused_from_construction_on(row: Row) -> None:
    """Speculative decoding asks once, before the first token: the answer must not change later."""
    cache = row.cache()
    assert not cache.is_trimmable()
    feed(cache, tensors(200), [199, 1])
    before = cache.nbytes
    with pytest.raises(CacheStateError, match="drops tokens and cannot trim"):
        cache.trim(1)
    assert not can_trim_prompt_cache([cache]) and trim_prompt_cache([cache], 3) == 0
    assert (cache.offset, cache.nbytes) == (200, before)


def test_whole_list_through_mlx_lm() -> None:
    caches = [r.cache() for r in KEEP]
    for cache in caches:
        feed(cache, tensors(100), [100])
    assert can_trim_prompt_cache(caches) and trim_prompt_cache(caches, 30) == 30
    assert all(cache.offset == 70 for cache in caches)
