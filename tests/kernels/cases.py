"""Stores of every layout that kernels read, and what attention over them must be."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from tests.matrix import Shape, tensors
from veloxquant_mlx.attention import reference
from veloxquant_mlx.attention.kernels import decode
from veloxquant_mlx.attention.kernels.sides import sides
from veloxquant_mlx.attention.masks import Mask
from veloxquant_mlx.cache.store import Store
from veloxquant_mlx.codecs.affine import ChannelAffine, TokenAffine
from veloxquant_mlx.codecs.base import Codec
from veloxquant_mlx.codecs.codebook import ScalarCodebook
from veloxquant_mlx.codecs.levels import lloyd_max
from veloxquant_mlx.codecs.transformed import Transformed
from veloxquant_mlx.codecs.vectors import ProductVectors
from veloxquant_mlx.core.types import Recipe, Stream
from veloxquant_mlx.transforms.rotation import rotation

# The relative size of half a unit in the last place.
HALF_UNIT = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def codec(kind: str, dim: int, bits: int, group: int = 32) -> Codec | None:
    """A codec of ``dim`` numbers whose codes are of ``kind`` (``Readable``); "floats" is none."""
    if kind == "token":
        return TokenAffine(bits, group, dim=dim)
    if kind == "channel":
        return ChannelAffine(bits, group)
    if kind == "codebook":
        return Transformed(ScalarCodebook(dim, lloyd_max(bits), bits), rotation(dim, bits))
    if kind == "product":
        return product(dim, bits, 4, (1, 1))
    assert kind == "floats"
    return None


def product(dim: int, bits: int, sub: int, books: tuple[int, int], channels: bool = False) -> ProductVectors:
    """Product codes by random codebooks; ``books`` counts them by head and by place."""
    book = _random_book((*books, 1 << bits, sub))
    return ProductVectors(bits, sub, rotation(dim, 5), dim=dim, channels=channels, fit_rows=64, book=book)


@cache
def _random_book(shape: tuple[int, ...]) -> mx.array:
    book = mx.random.normal(shape, key=mx.random.key(17)).astype(mx.float16)
    mx.eval(book)
    return book


def stream(codec: Codec | None, window: int = 0, sinks: int = 0, dtype: mx.Dtype | None = None) -> Stream:
    """Rows that ``codec`` packs in its own blocks."""
    return Stream(codec, window=window, chunk=1 if codec is None else codec.block, sinks=sinks, dtype=dtype)


def store(
    keys: Stream, values: Stream, n: int, shape: Shape = (1, 2, 64, 64), dtype: mx.Dtype = mx.float32, later: int = 0
) -> Store:
    """A store that has packed what it can of ``n`` random rows, and got ``later`` more since."""
    data = tensors(n + later, shape, dtype=dtype)
    out = Store(Recipe(keys, values))
    for start, stop in ((0, n), (n, n + later)):
        part = data.part(start, stop)
        if stop > start:
            out.append(part.k, part.v, start)
        if start == 0:
            out.seal(ends=True)
    return out


def queries(shape: Shape, repeats: int, length: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Queries for rows of ``shape``, ``repeats`` per kv head."""
    b, h, dim, _ = shape
    return mx.random.normal((b, h * repeats, length, dim), key=mx.random.key(9)).astype(dtype)


def expected(store: Store, q: mx.array, mask: Mask = None, sinks: mx.array | None = None) -> np.ndarray:
    """Attention over the rows that the codes stand for, in float32."""
    keys, values = store.keys.dense(dtype=mx.float32), store.values.dense(dtype=mx.float32)
    return np.array(reference.attention(q.astype(mx.float32), keys, values, q.shape[-1] ** -0.5, mask, sinks))


def by_kernel(store: Store, q: mx.array, mask: Mask = None, sinks: mx.array | None = None) -> mx.array:
    """Attention by kernels, which must be able to read the store."""
    found = sides(store, q.shape[-1])
    assert not isinstance(found, str), found
    return decode.attention(*found, q, q.shape[-1] ** -0.5, mask, sinks, store.n)


def check(store: Store, q: mx.array, mask: Mask = None, sinks: mx.array | None = None, *, atol: float = 2e-5) -> None:
    """The kernels against the reference: float32 sums of a few hundred terms of order one, in another order; of half
    precision outputs the rounding besides.
    """
    out, wanted = by_kernel(store, q, mask, sinks), expected(store, q, mask, sinks)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), wanted, rtol=HALF_UNIT[q.dtype], atol=atol)
