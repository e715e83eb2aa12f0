"""Attention through a cache equals plain float32 attention over the rows that it holds."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_causal_mask

from tests.matrix import DTYPES, IDS, ROWS, SHAPES, Row, feed, identical, split, tensors
from veloxquant_mlx.attention import reference
from veloxquant_mlx.cache.layer import CompressedKVCache
from veloxquant_mlx.models.rope import probe_rotation

EXACT_FIRST = [r for r in ROWS if r.identity]
QUANTISERS = [r for r in ROWS if not r.drops]
# float32: products and sums in another order. Half precision: inputs and output rounded at 2^-11 (fp16) and 2^-8
# (bf16), several roundings in a row.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 4e-3, mx.bfloat16: 4e-2}


def expected(cache: CompressedKVCache, q: mx.array, mask: mx.array | str | None, sinks: mx.array | None = None):
    """Reference over what the cache holds, before the pending rows are settled."""
    keys, values = cache.materialize()
    return reference.attention(q, keys, values, 0.125, mask, sinks)


def close(a: mx.array, b: mx.array) -> bool:
    tolerance = TOLERANCE[b.dtype]
    return a.dtype == b.dtype and bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), tolerance, tolerance))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(("length", "repeats"), [(1, 1), (1, 3), (2, 4), (5, 8), (300, 1), (300, 3)])
def test_grouped_queries(row: Row, length: int, repeats: int) -> None:
    data = tensors(280 + length, repeats=repeats)
    cache = row.cache()
    feed(cache, data.part(0, 280), [280])
    new = data.part(280, 280 + length)
    cache.update_and_fetch(new.k, new.v)
    mask = "causal" if length > 1 else None
    want = expected(cache, new.q, mask)
    assert close(cache.attend(new.q, scale=0.125, mask=mask), want)


# Every head size, and every dtype at one of them: the two do not meet in any line of code.
KINDS = [(shape, "fp32") for shape in SHAPES] + [("D64", "fp16"), ("D128", "bf16"), ("D80", "fp16")]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(("size", "kind"), KINDS)
def test_shapes_and_dtypes(row: Row, size: str, kind: str) -> None:
    """Dtype in is dtype out, on the way back from update as well, for every head size and for Dk != Dv."""
    shape, dtype = SHAPES[size], DTYPES[kind]
    data = tensors(131, shape, dtype=dtype)
    cache = row.cache(shape)
    feed(cache, data.part(0, 130), [130])
    new = data.part(130, 131)
    keys, values = cache.update_and_fetch(new.k, new.v)
    assert keys.dtype == values.dtype == dtype
    assert keys.shape == (*shape[:2], 131, shape[2]) and values.shape == (*shape[:2], 131, shape[3])
    want = expected(cache, new.q, None)
    out = cache.attend(new.q, scale=0.125)
    assert out.shape == (*new.q.shape[:3], shape[3]) and close(out, want)
    assert all(x.dtype == dtype for x in cache.materialize())


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize(
    ("length", "kind"), [(3, "bool"), (3, "heads"), (200, "additive"), (200, "batch"), (200, "heads")]
)
def test_array_masks(row: Row, length: int, kind: str) -> None:
    """Array masks have one column per token seen; each head picks the columns of the rows that it kept."""
    data = tensors(250 + length, (2, 2, 64, 64))
    cache = row.cache()
    feed(cache, data.part(0, 250), [249, 1])
    new = data.part(250, 250 + length)
    cache.update_and_fetch(new.k, new.v)
    causal = create_causal_mask(length, 250)
    holes = mx.random.bernoulli(0.7, (2, 4 if kind == "heads" else 1, length, 250 + length), key=mx.random.key(5))
    mask = causal if kind == "bool" else causal & holes if kind in ("batch", "heads") else mx.where(causal, 0.0, -1e9)
    positions = mx.broadcast_to(cache.positions, (2, 2, cache.positions.shape[-1]))
    wide = mx.broadcast_to(mask, (2, 4, length, 250 + length))
    columns = mx.broadcast_to(mx.repeat(positions, 2, axis=1)[:, :, None], (2, 4, length, positions.shape[-1]))
    picked = mx.take_along_axis(wide, mx.maximum(columns, 0), axis=-1)
    unseen = mx.array(False) if mask.dtype == mx.bool_ else mx.array(-1e9)
    want = expected(cache, new.q, mx.where(columns < 0, unseen, picked))  # heads of different lengths are padded
    assert close(cache.attend(new.q, scale=0.125, mask=mask), want)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
@pytest.mark.parametrize("length", [1, 150])
def test_learned_sinks(row: Row, length: int) -> None:
    """A learned sink logit per query head takes its share of the softmax on every path."""
    data = tensors(200 + length)
    cache = row.cache()
    feed(cache, data.part(0, 200), [200])
    new = data.part(200, 200 + length)
    cache.update_and_fetch(new.k, new.v)
    sinks, mask = mx.array([0.5, 3.0, -2.0, 8.0]), "causal" if length > 1 else None
    want = expected(cache, new.q, mask, sinks)
    assert close(cache.attend(new.q, scale=0.125, mask=mask, sinks=sinks), want)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_own_chunk_is_attended_exactly(row: Row) -> None:
    """The first chunk attends to itself uncompressed, whatever the method does with it afterwards."""
    data = tensors(180)
    out = feed(row.cache(), data, [180])
    assert close(out, reference.attention(data.q, data.k, data.v, 0.125, "causal"))


@pytest.mark.parametrize("row", EXACT_FIRST, ids=[r.id for r in EXACT_FIRST])
def test_identity_until_something_is_compressed(row: Row) -> None:
    """Bit for bit what MLX's own attention gives, prompt and decode, as long as nothing was changed."""
    data = tensors(row.identity)
    n = row.identity - 5
    out = feed(row.cache(), data, [n, *[1] * 5])
    for start, stop in [(0, n), *((i, i + 1) for i in range(n, n + 5))]:
        mask = "causal" if stop - start > 1 else None
        q, k, v = data.q[:, :, start:stop], data.k[:, :, :stop], data.v[:, :, :stop]
        own = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
        assert identical(out[:, :, start:stop], own)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_reference_switch(row: Row) -> None:
    """enable_vectorized_attend=False goes by the plain float32 path: the same numbers, and the receipt says so."""
    data, rope = tensors(300), probe_rotation(nn.RoPE(64), 64)
    fast, plain = (row.cache(rope=rope, enable_vectorized_attend=flag) for flag in (True, False))
    outs = [feed(cache, data, split(300, 90)) for cache in (fast, plain)]
    assert close(*outs)
    assert plain.describe()["attention"] == ["float32 reference on decoded rows"]
    assert plain.describe()["attention"] != fast.describe()["attention"]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_compute_dtype(row: Row) -> None:
    """``dtype`` sets the precision of attention's products: half precision shows, and the output keeps q's."""
    data = tensors(300)
    full, half = row.cache(), row.cache(dtype=mx.bfloat16)
    outs = [feed(cache, data, [299, 1])[:, :, -1:] for cache in (full, half)]
    assert outs[1].dtype == mx.float32 and not identical(*outs)
    assert mx.allclose(*outs, rtol=0.1, atol=0.1)  # bfloat16 keeps 8 bits of queries and weights


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_attending_twice_is_harmless(row: Row) -> None:
    """Layers that share another layer's rows attend once more per step: the rows must not change in between."""
    data = tensors(240)
    once, twice = row.cache(), row.cache()
    twice.shared = True
    chunks, at = [200, *[1] * 40], 0
    for n in chunks:
        now = data.part(at, at + n)
        at += n
        outs = []
        for cache, reads in ((once, 1), (twice, 2)):
            cache.update_and_fetch(now.k, now.v)
            mask = "causal" if n > 1 else None
            outs += [cache.attend(now.q, scale=0.125, mask=mask) for _ in range(reads)]
        assert all(close(out, outs[0]) for out in outs)
    twice.shared = False
    for cache in (once, twice):
        feed(cache, tensors(1, seed=9), [1])
    assert once.nbytes == twice.nbytes
