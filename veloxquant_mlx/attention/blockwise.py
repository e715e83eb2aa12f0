"""Prefill over packed history: blocks of decoded rows, online softmax. No decoded copy of the history exists.

MLX allocates the results of a graph faster than it computes them, so each block is evaluated before the next is
built: otherwise all blocks would live at once. No other attention waits for the device, and decoding never comes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from . import masks

if TYPE_CHECKING:
    from ..cache.store import Store
    from .entry import KeyView

# Rows decoded at a time, and query rows whose scores live at a time.
BLOCK = 512
QUERY_ROWS = 512


def attention(
    store: Store, q: mx.array, scale: float, mask: masks.Mask, sinks: mx.array | None, view: KeyView | None = None
) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over everything held, with at most one block of decoded rows alive."""
    tiles = [
        _query_tile(store, q[:, :, row : row + QUERY_ROWS], row, q.shape[2], scale, mask, sinks, view)
        for row in range(0, q.shape[2], QUERY_ROWS)
    ]
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def _query_tile(
    store: Store,
    q: mx.array,
    row: int,
    total: int,
    scale: float,
    mask: masks.Mask,
    sinks: mx.array | None,
    view: KeyView | None,
) -> mx.array:
    """Attention of query rows ``row`` on, of ``total`` in this call."""
    b, hq, length, d = q.shape
    n, past, h = store.n, store.n - total, store.keys.heads
    rows = (q * scale).astype(q.dtype).reshape(b, h, hq // h * length, d)
    # Running maximum, weight and weighted sum of the blocks so far; a learned sink counts from the start.
    shape = (b, h, hq // h, length, 1)
    if sinks is None:
        top, weight = mx.full(shape, mx.finfo(mx.float32).min), mx.zeros(shape)
    else:
        top, weight = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, h, hq // h, 1, 1), shape), mx.ones(shape)
    acc = mx.zeros((*shape[:4], store.values.dim))
    visible = min(n, past + row + length) if isinstance(mask, str) else n
    for start in range(0, visible, BLOCK):
        stop = min(start + BLOCK, visible)
        keys = store.keys.dense(start, stop, q.dtype)
        scores = rows @ (keys if view is None else view(keys, start)).swapaxes(-1, -2)
        scores = scores.astype(mx.float32).reshape(*shape[:4], stop - start)
        scores = masks.apply(scores, mask, past=past, row=row, column=start)
        peak = mx.maximum(top, scores.max(axis=-1, keepdims=True))
        shrink, p = mx.exp(top - peak), mx.exp(scores - peak)
        values = store.values.dense(start, stop, q.dtype, done=[p])
        mixed = p.astype(q.dtype).reshape(b, h, hq // h * length, stop - start) @ values
        acc = acc * shrink + mixed.astype(mx.float32).reshape(*shape[:4], -1)
        weight, top = weight * shrink + p.sum(axis=-1, keepdims=True), peak
        mx.eval(acc, weight, top)
    return (acc / weight).reshape(b, hq, length, -1).astype(q.dtype)
