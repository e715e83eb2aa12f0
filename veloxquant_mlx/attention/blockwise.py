"""Prefill over packed history: blocks of decoded rows, merged by their softmax weights. No decoded copy of the history.

MLX allocates the results of a graph faster than it computes them, so on a GPU only two blocks are ever in flight: one
is computed while the next is built. The CPU computes one at a time. No other attention waits for the device, and
decoding never comes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ..codecs.base import cast
from . import masks

if TYPE_CHECKING:
    from ..cache.store import Store
    from .entry import KeyView

# Rows decoded at a time, and query rows whose scores live at a time. On a GPU every launch has its price, so there
# the first is a least number: scores of one block, and floats of the decoded rows, take up to BYTES each.
BLOCK = 512
QUERY_ROWS = 512
GPU_QUERY_ROWS = 2048
BYTES = 256 << 20
MOST_BLOCK = 16384  # weights of more rows would be too small for halves


def product_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype to multiply in for queries of ``dtype``: float32, and float16 for half precision on a GPU.

    There, MLX adds up in float32 but rounds scores and blocks' sums to the dtype: float16 has 11 bits and range enough
    (rows stop at 65504, scores of a working model stay far below), bfloat16 would have 8.
    """
    return mx.float32 if dtype == mx.float32 or mx.default_device() == mx.cpu else mx.float16


def attention(
    store: Store, q: mx.array, scale: float, mask: masks.Mask, sinks: mx.array | None, view: KeyView | None = None
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over everything held, in q's dtype, with one or two blocks of rows alive."""
    length = q.shape[2]
    rows, block = _sizes(store, q)
    tiles = [
        _query_tile(store, q[:, :, row : row + rows], row, length, block, scale, mask, sinks, view)
        for row in range(0, length, rows)
    ]
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def _sizes(store: Store, q: mx.array) -> tuple[int, int]:
    """Query rows of a tile, and rows of history of a block."""
    if mx.default_device() == mx.cpu:
        return QUERY_ROWS, BLOCK
    b, hq, length, d = q.shape
    rows = min(length, GPU_QUERY_ROWS)
    scores, decoded = b * hq * rows * q.dtype.size, b * store.keys.heads * (d + store.values.dim) * mx.float32.size
    return rows, min(max(BYTES // max(scores, decoded) // BLOCK * BLOCK, BLOCK), MOST_BLOCK)


def _query_tile(
    store: Store,
    q: mx.array,
    row: int,
    total: int,
    block: int,
    scale: float,
    mask: masks.Mask,
    sinks: mx.array | None,
    view: KeyView | None,
) -> mx.array:
    """Attention of query rows ``row`` on, of ``total`` in this call."""
    b, hq, length, d = q.shape
    n, past, h = store.n, store.n - total, store.keys.heads
    rows = (q * scale).astype(q.dtype).reshape(b, h, hq // h * length, d)
    # Weighted sum, weight and maximum of the blocks so far; a learned sink counts from the start.
    shape = (b, h, hq // h, length, 1)
    acc = mx.zeros((*shape[:4], store.values.dim))
    if sinks is None:
        weight, top = mx.zeros(shape), mx.full(shape, mx.finfo(mx.float32).min)
    else:
        weight, top = mx.ones(shape), mx.broadcast_to(sinks.astype(mx.float32).reshape(1, h, hq // h, 1, 1), shape)
    gpu = mx.default_device() == mx.gpu
    merge, running = _merge_fused if gpu else _merge, None
    visible = min(n, past + row + length) if isinstance(mask, str) else n
    for start in range(0, visible, block):
        stop = min(start + block, visible)
        keys = cast(store.keys.dense(start, stop, mx.float32), q.dtype)
        scores = rows @ (keys if view is None else view(keys, start)).swapaxes(-1, -2)
        scores = _masked(scores.reshape(*shape[:4], stop - start), mask, past, row, start)
        weights, more, peak = _weights(scores, q.dtype)
        values = cast(store.values.dense(start, stop, mx.float32, done=[weights]), q.dtype)
        mixed = weights.reshape(b, h, -1, stop - start) @ values
        acc, weight, top = merge(acc, weight, top, mixed.reshape(*shape[:4], -1), more, peak)
        if not gpu:
            mx.eval(acc, weight, top)
            continue
        flag = top[:1, :1, :1, :1]
        mx.async_eval(flag, acc, weight, top)
        if running is not None:
            running.item()  # waits for this array and no more; eval would wait for all under way
        running = flag
    return (acc / weight).reshape(b, hq, length, -1).astype(q.dtype)


def _masked(scores: mx.array, mask: masks.Mask, past: int, row: int, column: int) -> mx.array:
    if not isinstance(mask, mx.array):
        return masks.apply(scores, mask, past, row, column)
    # What a mask adds may be -inf, or beyond the range of halves; rows without a visible score must stay finite.
    wide = masks.apply(scores.astype(mx.float32), mask, past, row, column)
    return mx.maximum(wide, mx.finfo(mx.float32).min) if mask.dtype != mx.bool_ else wide


def _weights(scores: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Weights of a block in ``dtype``, their total, and the logarithm of what they were divided by, in float32.

    Halves are normalised, as exponentials would add up to less than they are; the largest weight is one part in the
    block's sum of exponentials, so that this sum needs no pass of its own.
    """
    peak = scores.max(axis=-1, keepdims=True).astype(mx.float32)
    if dtype == mx.float32:
        weights = mx.exp(scores.astype(mx.float32) - peak)
        return weights, weights.sum(axis=-1, keepdims=True), peak
    weights = mx.softmax(scores, axis=-1, precise=True).astype(dtype)
    return weights, mx.ones_like(peak), peak - mx.log(weights.max(axis=-1, keepdims=True).astype(mx.float32))


def _merge(
    acc: mx.array, weight: mx.array, top: mx.array, mixed: mx.array, total: mx.array, peak: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The running sums with those of one more block, whose weights were divided by the exponential of ``peak``."""
    new = mx.maximum(top, peak)
    shrink, more = mx.exp(top - new), mx.exp(peak - new)
    return acc * shrink + mixed.astype(mx.float32) * more, weight * shrink + total * more, new


_merge_fused = mx.compile(_merge)
