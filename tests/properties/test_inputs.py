"""What comes in: extreme values work, impossible tensors are refused with nothing changed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.matrix import DTYPES, IDS, ROWS, Row, feed, split, tensors
from veloxquant_mlx import CacheInputError, CacheStateError

SHAPE = (1, 2, 64, 64)


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


BAD = {
    "rank": (zeros(2, 4, 64), zeros(2, 4, 64), "4 axes"),
    "tokens differ": (zeros(1, 2, 4, 64), zeros(1, 2, 5, 64), "must agree in"),
    "heads differ": (zeros(1, 2, 4, 64), zeros(1, 3, 4, 64), "must agree in"),
    "no tokens": (zeros(1, 2, 0, 64), zeros(1, 2, 0, 64), "may be empty"),
    "empty batch": (zeros(0, 2, 4, 64), zeros(0, 2, 4, 64), "may be empty"),
    "integers": (zeros(1, 2, 4, 64, dtype=mx.int32), zeros(1, 2, 4, 64, dtype=mx.int32), "a float dtype"),
}
LATER = {
    "batch": zeros(2, 2, 4, 64),
    "heads": zeros(1, 3, 4, 64),
    "head size": zeros(1, 2, 4, 32),
}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("case", BAD)
def test_refused_on_an_empty_cache(row: Row, case: str) -> None:
    keys, values, message = BAD[case]
    cache = row.cache()
    with pytest.raises(CacheInputError, match=message):
        cache.update_and_fetch(keys, values)
    assert cache.empty() and cache.offset == 0
    feed(cache, tensors(40), [40])


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("case", LATER)
def test_refused_on_a_filled_cache(row: Row, case: str) -> None:
    cache = row.cache()
    feed(cache, tensors(150), [149, 1])
    before, held = cache.nbytes, cache.offset
    with pytest.raises(CacheInputError, match="this cache holds"):
        cache.update_and_fetch(LATER[case], LATER[case])
    assert (cache.nbytes, cache.offset) == (before, held)
    feed(cache, tensors(1), [1])


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("tensor", ["keys", "values"])
def test_non_finite_rows_are_an_error(row: Row, value: float, tensor: str) -> None:
    """Seen at the next call, so that decoding never waits; the message names the first token of the chunk."""
    data = tensors(160)
    feed(cache := row.cache(), data.part(0, 100), [100])
    bad = data.part(100, 150)
    spoiled = mx.where(mx.arange(50)[:, None] == 20, value, bad.k if tensor == "keys" else bad.v)
    cache.update_and_fetch(*((spoiled, bad.v) if tensor == "keys" else (bad.k, spoiled)))
    mx.eval(cache.attend(bad.q, scale=0.125, mask="causal"), cache.state)
    for _ in range(2):
        with pytest.raises(CacheStateError, match="from token 100 on hold NaN or infinity"):
            cache.update_and_fetch(data.part(150, 151).k, data.part(150, 151).v)
    assert cache.offset == 150


def test_full_capacity_is_an_error() -> None:
    cache = next(r for r in ROWS if r.id == "kivi-2").cache(capacity=100)
    feed(cache, tensors(100), [60, 40])
    with pytest.raises(CacheStateError, match=r"capacity=100 tokens; 100 are held and 1 more came.*Raise capacity"):
        cache.update_and_fetch(*(x for x in (tensors(1).k, tensors(1).v)))
    assert cache.offset == 100


def test_capacity_bounds_a_policy_from_the_first_chunk_on() -> None:
    """An int is the switch from the paper's deferred rule to a hard cap, for the prompt and while decoding."""
    row = next(r for r in ROWS if r.id == "snapkv-64")
    cache, data = row.cache(capacity=96), tensors(600)
    at, chunks = 0, [*split(500, 90), *[1] * 100]
    for n in chunks:
        now = data.part(at, at + n)
        cache.update_and_fetch(now.k, now.v)
        cache.attend(now.q, scale=0.125, mask="causal" if n > 1 else None)
        at += n
        assert cache.positions.shape[-1] <= 96
    assert cache.offset == 600
    assert cache.positions[..., -1].min().item() == 599


EXTREMES = {
    "zeros": lambda x: x * 0,
    "constant": lambda x: x * 0 + 3.25,
    "constant rows": lambda x: mx.broadcast_to(x[..., :1], x.shape),
    "outliers": lambda x: mx.where(mx.arange(64) == 7, 1e4, x),
    "tiny": lambda x: x * 1e-6,
    "large": lambda x: x * 1e4,
    "offset": lambda x: x + 3e4,
}


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(
    ("case", "kind"), [*((case, "fp16") for case in EXTREMES), ("large", "bf16"), ("offset", "fp32")]
)
def test_extreme_values_stay_finite(row: Row, case: str, kind: str) -> None:
    dtype = DTYPES[kind]
    data = tensors(200)
    keys, values = (mx.clip(EXTREMES[case](x), -6e4, 6e4).astype(dtype) for x in (data.k, data.v))
    extreme = type(data)(data.q.astype(dtype), keys, values)
    cache = row.cache()
    out = feed(cache, extreme, [198, 1, 1], scale=1e-3)
    rows = cache.materialize()
    assert all(bool(mx.isfinite(x.astype(mx.float32)).all()) for x in (out, *rows))
    if case == "zeros":
        assert not out.any() and not any(x.any() for x in rows)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_strided_views(row: Row) -> None:
    """A slice of a larger array, as fused projections give it: the same as a contiguous copy."""
    wide = tensors(200, (1, 4, 128, 128))
    views = type(wide)(wide.q[:, :4, :150, 32:96], wide.k[:, 1:3, :150, 32:96], wide.v[:, 1:3, :150, 32:96])
    copies = type(wide)(*(mx.array(x.tolist()) for x in (views.q, views.k, views.v)))
    outs = [feed(row.cache(), data, [149, 1]) for data in (views, copies)]
    assert mx.allclose(*outs, rtol=1e-5, atol=1e-6)
