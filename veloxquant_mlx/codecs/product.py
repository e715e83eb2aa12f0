"""Product vector quantisation: sub-vectors as indices into codebooks, k-means for the codebooks, scores by tables.

Codebooks have the shape ``(H | 1, P | 1, K, d)``: per head or for all, per place of the sub-vector in the row or for
all places, ``K`` entries of ``d`` numbers.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .packing import pack_bytes, unpack

# Distances held at a time while sub-vectors are encoded (float32).
HELD = 1 << 24
SEEDED = 1 << 26  # products of rows and entries up to which the seeds of k-means are drawn from all rows


def kmeans(x: np.ndarray, count: int, sweeps: int, seed: int, start: np.ndarray | None = None) -> np.ndarray:
    """``count`` centres ``(count, d)`` float32 of the rows ``x`` ``(N, d)``; the same for the same seed everywhere.

    From ``start`` or seeds by k-means++ (Arthur, Vassilvitskii 2007; from 65536 rows where there are many), then
    Lloyd's algorithm until the error falls by less than 1e-5 of itself. Centres without rows move to the rows with the
    largest error.
    """
    x = np.asarray(x, dtype=np.float32)
    centres = _seeds(x, count, seed) if start is None else np.asarray(start, dtype=np.float32)
    last = np.inf
    for _ in range(sweeps):
        place, errors = _assign(x, centres)
        size = np.bincount(place, minlength=count)
        sums = np.stack([np.bincount(place, weights=column, minlength=count) for column in x.T], axis=1)
        centres = np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], centres).astype(np.float32)
        empty = np.flatnonzero(size == 0)
        if empty.size:
            centres[empty] = x[np.argsort(-errors, kind="stable")[: empty.size]]
        error = float(errors.sum(dtype=np.float64))
        if last - error < 1e-5 * last and not empty.size:
            break
        last = error
    return centres


def _seeds(x: np.ndarray, count: int, seed: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    some = x if len(x) * count <= SEEDED else x[rng.permutation(len(x))[: max(1 << 16, count)]]
    centres = np.empty((count, x.shape[1]), np.float32)
    distance = np.ones(len(some), np.float64)
    for i in range(count):
        total = np.cumsum(distance)
        # where all rows are centres already, any row will do
        chosen = np.searchsorted(total, rng.random() * total[-1], side="right") if total[-1] > 0 else i % len(some)
        centres[i] = some[min(chosen, len(some) - 1)]
        fresh = np.square(some - centres[i]).sum(1)
        distance = np.minimum(distance, fresh) if i else fresh.astype(np.float64)
    return centres


def _assign(x: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centre of every row (of equals the first) and the squared distance to it."""
    half, step = np.square(centres).sum(1) / 2, max(HELD // len(centres), 1)
    place, best = np.empty(len(x), np.int64), np.empty(len(x), np.float32)
    for start in range(0, len(x), step):
        score = x[start : start + step] @ centres.T - half
        place[start : start + step] = score.argmax(1)
        best[start : start + step] = score.max(1)
    return place, np.maximum(np.square(x).sum(1) - 2 * best, 0)


def nearest(x: mx.array, books: mx.array) -> mx.array:
    """Indices ``(B, H, n, P)`` uint32 of the nearest entries for rows ``(B, H, n, P * d)``, any float dtype."""
    books = books.astype(mx.float32)
    *_, count, d = books.shape
    b, h, n, dim = x.shape
    half, entries = mx.square(books).sum(-1)[:, :, None] / 2, books.swapaxes(-1, -2)
    step = max(HELD // (b * h * dim // d * count), 1)
    parts: list[mx.array] = []
    for start in range(0, n, step):
        rows = x[:, :, start : start + step].astype(mx.float32)
        if parts:
            rows = mx.depends(rows, parts[-1])
        rows = rows.reshape(b, h, -1, dim // d, d).swapaxes(2, 3)
        parts.append(mx.argmax(rows @ entries - half, axis=-1).swapaxes(2, 3))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def entries_of(index: mx.array, books: mx.array) -> mx.array:
    """The rows ``(B, H, n, P * d)`` in float32 that ``index`` ``(B, H, n, P)`` stands for."""
    heads, places, count, d = books.shape
    first = mx.arange(0, heads * places * count, count, dtype=mx.uint32).reshape(heads, 1, places)
    flat = index.astype(mx.uint32) if heads == places == 1 else index.astype(mx.uint32) + first
    rows = mx.take(books.astype(mx.float32).reshape(-1, d), flat, axis=0)
    return rows.reshape(*index.shape[:-1], -1)


def tables(q: mx.array, books: mx.array) -> mx.array:
    """What every entry adds to a score: float32 ``(B, H, R, P, K)`` for query rows ``(B, H, R, P * d)``."""
    b, h, r, dim = q.shape
    d = books.shape[-1]
    parts = q.astype(mx.float32).reshape(b, h, r, dim // d, d).swapaxes(2, 3)
    return (parts @ books.astype(mx.float32).swapaxes(-1, -2)).swapaxes(2, 3)


def look_up(tables: mx.array, index: mx.array) -> mx.array:
    """Scores ``(B, H, R, n)`` of rows ``index`` ``(B, H, n, P)`` from the ``tables`` of the query."""
    b, h, r, places, count = tables.shape
    narrow = mx.uint16 if places * count <= 1 << 16 else mx.uint32
    first = mx.arange(0, places * count, count, dtype=mx.uint32).astype(narrow)
    n = index.shape[2]
    flat = mx.broadcast_to((index.astype(narrow) + first).reshape(b, h, 1, -1), (b, h, r, n * places))
    return mx.take_along_axis(tables.reshape(b, h, r, -1), flat, axis=-1).reshape(b, h, r, n, places).sum(-1)


def pack_index(index: mx.array, bits: int) -> mx.array:
    """Indices ``(..., P)`` of up to 16 bits as bytes ``(..., W)``: the lower 8 bits, then what is above them."""
    if bits <= 8:
        return pack_bytes(index, bits)
    low = (index & 255).astype(mx.uint8)
    return mx.concatenate([low, pack_bytes(index >> 8, bits - 8)], axis=-1)


def unpack_index(stream: mx.array, bits: int, n: int) -> mx.array:
    """The ``n`` indices per row that ``pack_index`` packed: uint8, or uint16 above 8 bits."""
    if bits <= 8:
        return unpack(stream, bits, n)
    high = unpack(stream[..., n:], bits - 8, n).astype(mx.uint16)
    return stream[..., :n].astype(mx.uint16) | (high << 8)
