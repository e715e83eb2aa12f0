"""Prefill over packed history: blocks of decoded rows, online softmax. No decoded copy of the history exists.

MLX allocates the results of a graph faster than it computes them, so each block is evaluated before the next is
built: otherwise all blocks would live at once. This is the one place that waits for the device; decoding never comes
here.
"""

from __future__ import annotations

import mlx.core as mx

from ..cache.store import Store
from . import masks

# Rows decoded at a time, and query rows whose scores live at a time.
BLOCK = 512
QUERY_ROWS = 512


def attention(store: Store, q: mx.array, scale: float, mask: masks.Mask, sinks: mx.array | None) -> mx.array:
    """Attention of ``q`` ``(B, Hq, L, D)`` over everything held, with at most one block of decoded rows alive."""
    tiles: list[mx.array] = []
    for row in range(0, q.shape[2], QUERY_ROWS):
        part = q[:, :, row : row + QUERY_ROWS]
        tiles.append(_query_tile(store, part, row, q.shape[2], scale, mask, sinks, tiles[-1:]))
    return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=2)


def _query_tile(
    store: Store,
    q: mx.array,
    row: int,
    total: int,
    scale: float,
    mask: masks.Mask,
    sinks: mx.array | None,
    done: list[mx.array],
) -> mx.array:
    b, hq, length, d = q.shape
    n, past = store.n, store.n - total
    rows = (q * scale).astype(q.dtype)
    top = acc = None  # running maximum and [weighted sum | weight]
    visible = min(n, past + row + length) if isinstance(mask, str) else n
    for start in range(0, visible, BLOCK):
        stop = min(start + BLOCK, visible)
        keys = store.keys.dense(start, stop, q.dtype, done)
        h = keys.shape[1]
        scores = rows.reshape(b, h, hq // h * length, d) @ keys.swapaxes(-1, -2)
        scores = scores.astype(mx.float32).reshape(b, h, hq // h, length, stop - start)
        scores = masks.apply(scores, mask, past=past, row=row, column=start)
        if top is None:
            top, acc, weight = _first(scores, sinks)
        peak = mx.maximum(top, scores.max(axis=-1, keepdims=True))
        shrink, p = mx.exp(top - peak), mx.exp(scores - peak)
        values = store.values.dense(start, stop, q.dtype, [p])
        mixed = p.astype(q.dtype).reshape(b, h, hq // h * length, stop - start) @ values
        mixed = mixed.reshape(b, h, hq // h, length, values.shape[-1]).astype(mx.float32)
        acc = mixed if acc is None else acc * shrink + mixed
        weight = weight * shrink + p.sum(axis=-1, keepdims=True)
        top, done = peak, [acc]
        mx.eval(top, acc, weight)
    assert acc is not None
    return (acc / weight).reshape(b, hq, length, acc.shape[-1]).astype(q.dtype)


def _first(scores: mx.array, sinks: mx.array | None) -> tuple[mx.array, None, mx.array]:
    """Running maximum, weighted sum and weight before the first block: a learned sink counts from the start."""
    b, h, r, length, _ = scores.shape
    shape = (b, h, r, length, 1)
    if sinks is None:
        return mx.full(shape, mx.finfo(mx.float32).min), None, mx.zeros(shape)
    return mx.broadcast_to(sinks.astype(mx.float32).reshape(1, h, r, 1, 1), shape), None, mx.ones(shape)
